"""`RULES` lists upstream's rules for requests, what became of each here, and the test that holds it.

Upstream is vLLM 0.33.0. A rule *rewrites* or *refuses*, is kept by the *codec* of its field while
the request is written, or is *not ours*, with the reason.
"""

from __future__ import annotations

import ast
from pathlib import Path

import attrs
import pytest

TESTS = Path(__file__).parents[1]


@attrs.frozen
class Rule:
    """One rule; ``test`` is ``file::function`` under ``tests/``, without which there is a reason."""

    what: str
    upstream: str
    here: str
    test: str = ""


VALIDATION = "client/test_input_validation.py"
DEFAULTS = "client/test_input_defaults.py"
STRUCTURED = "client/test_structured_outputs.py"
SCHEMA = "client/test_json_schema.py"
TOKEN_IDS = "client/test_token_ids.py"
SIZE = "client/test_vocab_size.py"
FIELD = f"{VALIDATION}::test_sampling_parameter_is_refused"
TOGETHER = f"{VALIDATION}::test_sampling_parameters_that_do_not_go_together"
REQUEST = f"{VALIDATION}::test_request_is_refused"
UNSUPPORTED = f"{VALIDATION}::test_unsupported_field_is_told_apart"
LAXER = f"{STRUCTURED}::test_what_the_backend_cannot_compile_is_refused"

POST_INIT = "SamplingParams.__post_init__"
ARGS = "SamplingParams._verify_args"
LOGPROBS = "SamplingParams._validate_logprobs"
TRACE = "SamplingParams._validate_trace_replay"
STRUCTURES = "SamplingParams._validate_structured_outputs"
XGRAMMAR = "backend_xgrammar.validate_xgrammar_grammar"
GUIDANCE = "backend_guidance.validate_guidance_grammar"
OUTLINES = "backend_outlines.validate_structured_output_request_outlines"
ENFORCER = "backend_lm_format_enforcer.validate_structured_output_request_lm_format_enforcer"
PROCESS = "InputProcessor.process_inputs"
PARAMS = "InputProcessor._validate_params"
POOLING = "PoolingParams.verify"
RUST = "rust/src/text/src/lower.rs"

ENGINE_DOES = "not ours: the engine's own constructor does it while it decodes"
NO_TEXT = "refuses: there is no tokenizer here, so a TypeError says what to do instead"
NAMES = "protocol/test_vllm_names.py::test_name_of_vllms_class_is_explained"
NO_CONFIG = "not ours: nothing tells it of the engine"

RULES = [
    # SamplingParams
    Rule("temperature between 0 and 0.01 becomes 0.01", POST_INIT, ENGINE_DOES),
    Rule("greedy sampling resets top_p, top_k and min_p", POST_INIT, ENGINE_DOES),
    Rule("greedy sampling wants n=1", POST_INIT, "not ours: each completion is a request of n=1"),
    Rule("seed -1 is none", POST_INIT, "rewrites", f"{DEFAULTS}::test_minus_one_is_none"),
    Rule("thinking budget -1 is none", POST_INIT, "rewrites", f"{DEFAULTS}::test_minus_one_is_none"),
    Rule("other negative thinking budgets", POST_INIT, "codec", FIELD),
    Rule("stop token ids once each", POST_INIT, ENGINE_DOES),
    Rule("logprobs True is 1", POST_INIT, "codec refuses: a boolean is no count", FIELD),
    Rule(
        "stop ids are among all stop ids", POST_INIT, "rewrites",
        f"{DEFAULTS}::test_ids_to_mask_are_the_stop_and_end_of_text_ids",
    ),
    Rule("no cached prefix with prompt logprobs", POST_INIT, ENGINE_DOES),
    Rule("… nor where the caller says otherwise", POST_INIT, "refuses, upstream does not", TOGETHER),
    Rule("strings: stop, bad_words, detokenize, include_stop_str_in_output", ARGS, NO_TEXT, NAMES),
    Rule("n at least 1", ARGS, "codec", FIELD),
    Rule("n at most VLLM_MAX_N_SEQUENCES", ARGS, "refuses",
         "llm/test_generate.py::test_bad_requests_are_refused_and_nothing_is_sent"),
    Rule("integers in extra_args fit 64 bits", "SamplingParams._verify_extra_args", "codec", FIELD),
    Rule("penalties in [-2, 2]", ARGS, "codec", FIELD),
    Rule("repetition_penalty above 0, finite", ARGS, "codec", FIELD),
    Rule("temperature in [0, 2], finite", ARGS, "codec", FIELD),
    Rule("top_p in (0, 1]", ARGS, "codec", FIELD),
    Rule("top_k an integer from -1", ARGS, "codec", FIELD),
    Rule("min_p in [0, 1]", ARGS, "codec", FIELD),
    Rule("max_tokens at least 1", ARGS, "codec", FIELD),
    Rule("min_tokens from 0", ARGS, "codec", FIELD),
    Rule("min_tokens at most max_tokens", ARGS, "refuses", TOGETHER),
    Rule("stream_interval at least 1", ARGS, "codec", FIELD),
    Rule("logprobs and prompt_logprobs from -1", ARGS, "codec", FIELD),
    Rule("stop_token_ids are integers", ARGS, "codec", FIELD),
    Rule("repetition detection's sizes and count", "RepetitionDetectionParams", "codec", TOGETHER),
    Rule("one constraint exactly", "StructuredOutputsParams", "codec",
         f"{VALIDATION}::test_structured_output_is_refused"),
    Rule("logit_bias in [-100, 100]", "SamplingParams.from_optional", "rewrites",
         f"{DEFAULTS}::test_logit_bias_is_brought_into_range"),
    Rule("logit_bias with text keys", "SamplingParams.from_optional", "codec refuses", FIELD),
    Rule("end-of-text ids of the generation config", "SamplingParams.update_from_generation_config",
         "not ours: the caller has the model's files and sets eos_token_id"),
    Rule("bad words become token ids", "SamplingParams.update_from_tokenizer", NO_TEXT, NAMES),
    Rule("bad words are in the vocabulary", "SamplingParams.update_from_tokenizer", "refuses", FIELD),
    # SamplingParams.verify
    Rule("logprobs at most --max-logprobs", LOGPROBS, "refuses, if it is stated", UNSUPPORTED),
    Rule("logprobs at most the vocabulary", LOGPROBS, "refuses", FIELD),
    Rule("128 logprob_token_ids at most", LOGPROBS, "codec", FIELD),
    Rule("logprob_token_ids in the vocabulary", LOGPROBS, "refuses", FIELD),
    Rule("logprobs is the number of logprob_token_ids", LOGPROBS, "refuses", TOGETHER),
    Rule("prompt_logprob_token_ids: shape, rows, ids", LOGPROBS, "refuses", FIELD),
    Rule("prompt_logprob_token_ids: rows of lists are padded", LOGPROBS, "rewrites",
         f"{DEFAULTS}::test_rows_of_ids_are_padded"),
    Rule("prompt_logprob_token_ids: int32", LOGPROBS, "rewrites",
         f"{DEFAULTS}::test_prompt_token_ids_to_score_are_narrowed"),
    Rule("prompt_logprob_start needs ids", LOGPROBS, "refuses", FIELD),
    Rule("stop_token_ids in the vocabulary", "SamplingParams._validate_stop_token_ids", "refuses", FIELD),
    Rule("logit_bias in the vocabulary", "SamplingParams._validate_logit_bias", "refuses", FIELD),
    Rule("allowed_token_ids in the vocabulary, some", "SamplingParams._validate_allowed_token_ids",
         "refuses", FIELD),
    Rule("a trace is not empty and in the vocabulary", TRACE, "refuses", FIELD),
    Rule("a trace goes with no constraint or prompt logprobs", TRACE, "refuses", TOGETHER),
    Rule("no trace, min_p or bias with speculative decoding", TRACE, NO_CONFIG),
    Rule("diffusion models sample by their own schedule", "SamplingParams._validate_diffusion", NO_CONFIG),
    # Structured outputs
    Rule("the backend of the server", STRUCTURES, "rewrites",
         f"{DEFAULTS}::test_structured_outputs_get_a_backend"),
    Rule("no other backend per request", STRUCTURES, "refuses what the engines do not have already",
         "client/test_facts.py::test_an_engine_keeps_its_first_backend"),
    Rule("choices: some", STRUCTURES, "codec", f"{STRUCTURED}::test_choices_that_are_none_are_refused_as_they_are"),
    Rule("blank json, grammar, structural_tag", STRUCTURES, "refuses",
         f"{VALIDATION}::test_structured_output_is_refused"),
    Rule("nesting of 64, of 80 for tags", "check_json_nesting", "refuses",
         f"{VALIDATION}::test_structured_output_is_refused"),
    Rule("json_object False", STRUCTURES, "codec", f"{VALIDATION}::test_structured_output_is_refused"),
    Rule("NUL in a regex", STRUCTURES, "refuses", f"{VALIDATION}::test_structured_output_is_refused"),
    Rule("auto: xgrammar, else guidance, else outlines", STRUCTURES, "rewrites",
         f"{STRUCTURED}::test_auto_takes_the_backend_that_can_do_it"),
    Rule("Mistral and slow tokenizers", STRUCTURES, "not ours: there is no tokenizer here"),
    Rule("choices become a grammar", XGRAMMAR, "rewrites",
         f"{STRUCTURED}::test_choices_are_a_grammar_for_xgrammar"),
    Rule("keywords that xgrammar drops", "has_xgrammar_unsupported_json_features", "refuses",
         f"{SCHEMA}::test_keyword_that_xgrammar_drops"),
    Rule("… the same ones as upstream", "has_xgrammar_unsupported_json_features", "refuses",
         f"{STRUCTURED}::test_dropped_keywords_are_those_of_upstream"),
    Rule("JSON that does not parse, a schema that does not compile", XGRAMMAR, "refuses what shows",
         f"{SCHEMA}::test_fault_that_both_backends_find"),
    Rule("a regex that does not compile", XGRAMMAR, "refuses what shows", LAXER),
    Rule("a grammar that does not compile", XGRAMMAR, "refuses without a first rule", LAXER),
    Rule("Lark becomes EBNF", XGRAMMAR, "not ours: engines compile either since 0.32"),
    Rule("which syntax a grammar has", "utils.grammar_is_likely_lark", "refuses by it",
         f"{STRUCTURED}::test_syntax_of_a_grammar"),
    Rule("a structural tag that does not compile", XGRAMMAR, "refuses what shows", LAXER),
    Rule("patternProperties do not go to guidance", "has_guidance_unsupported_json_features",
         "rewrites, for auto", f"{SCHEMA}::test_pattern_properties_are_found_anywhere"),
    Rule("what llguidance does not implement", GUIDANCE, "refuses",
         f"{SCHEMA}::test_keyword_that_guidance_refuses"),
    Rule("tags without structures or triggers", GUIDANCE, "refuses", LAXER),
    Rule("no json_object, grammar, structural_tag", OUTLINES, "refuses",
         f"{STRUCTURED}::test_each_backend_does_some_kinds_of_constraints"),
    Rule("look-around, anchors first", "backend_outlines.validate_regex_is_buildable", "refuses",
         "client/test_regex_syntax.py::test_expression_that_outlines_does_not_take"),
    Rule("a schema becomes a regex", OUTLINES, "not ours: needs outlines itself"),
    Rule("no grammar, structural_tag", ENFORCER, "refuses",
         f"{STRUCTURED}::test_each_backend_does_some_kinds_of_constraints"),
    Rule("a schema can be JSON", ENFORCER, "refuses", LAXER),
    Rule("nothing that a backend takes", "all four", "is refused",
         f"{STRUCTURED}::test_nothing_is_refused_that_upstream_takes"),
    # InputProcessor
    Rule("sampling parameters need a model that generates", PARAMS, "refuses", UNSUPPORTED),
    Rule("prompt_logprob_token_ids need the V2 model runner", PARAMS, NO_CONFIG),
    Rule("custom logits processors check parameters", PARAMS, NO_CONFIG),
    Rule("return_sampling_mask wants top_k and a temperature", PARAMS, NO_CONFIG),
    Rule("a thinking budget needs a reasoning parser", PARAMS, "refuses, if it is stated", UNSUPPORTED),
    Rule("a trace needs --enable-trace-replay", PARAMS, "refuses, if it is stated", UNSUPPORTED),
    Rule("watermarking is resolved to a boolean", "InputProcessor.resolve_watermarking",
         "not ours: the server's configuration decides; the caller's value is sent"),
    Rule("the default pooling task", PARAMS, "refuses: the caller names it", REQUEST),
    Rule("the pooling task is one of the model", PARAMS, "refuses", UNSUPPORTED),
    Rule("LoRA is enabled", "InputProcessor._validate_lora", "refuses", UNSUPPORTED),
    Rule("data_parallel_rank is one of the engines", PROCESS, "refuses", "client/test_load_balancing.py::test_pinned_to_an_engine_that_is_not_there"),
    Rule("the prompt is not empty", "InputProcessor._validate_prompt_len", "refuses",
         f"{VALIDATION}::test_empty_prompt_is_refused"),
    Rule("the prompt fits the context", "InputProcessor._validate_prompt_len", "refuses", REQUEST),
    Rule("prompt tokens are in the vocabulary", "InputProcessor._validate_model_input", "refuses", REQUEST),
    Rule("prompt_is_token_ids has the prompt's length", "InputProcessor._validate_model_input",
         "refuses", REQUEST),
    Rule("items fit the encoder's cache", "InputProcessor._validate_model_input", NO_CONFIG),
    Rule("embeddings need --enable-prompt-embeds", "renderer", "refuses unless stated", UNSUPPORTED),
    Rule("no penalties for embeddings without tokens", "GPUInputBatch", "refuses, upstream does not",
         UNSUPPORTED),
    Rule("embeddings have the hidden size", "renderer", "refuses", REQUEST),
    Rule("features only to a multimodal model", PROCESS, "refuses unless stated", UNSUPPORTED),
    Rule("features in the order of their places", PROCESS, "refuses others", REQUEST),
    Rule("routed_experts_prompt_start inside the prompt", PROCESS, "refuses", FIELD),
    Rule("as many rows of ids as scored tokens", PROCESS, "refuses", TOGETHER),
    Rule("max_tokens None is what the context leaves", PROCESS, "rewrites, in Llm",
         "llm/test_generate.py::test_what_the_caller_leaves_out_is_filled_in"),
    Rule("a trace sets max_tokens and drops stops", "InputProcessor._normalize_trace_replay_params",
         "rewrites", f"{DEFAULTS}::test_trace_is_replayed_to_its_end"),
    Rule("a trace fits the context", "InputProcessor._normalize_trace_replay_params", "rewrites",
         f"{DEFAULTS}::test_trace_is_cut_at_the_end_of_the_context"),
    Rule("chunks: no pooling, no embeddings", "AsyncLLM._validate_streaming_input_sampling_params",
         "refuses", REQUEST),
    Rule("as many ids, biases and words as tables have room", "v1/worker/gpu/sample", "refuses unless stated", UNSUPPORTED),
    Rule("children have seeds of their own", "ParentRequest", "rewrites, in Llm",
         "llm/test_completions.py::test_children_are_named_and_seeded_as_upstream_does"),
    # PoolingParams
    Rule("mode and query_uses of late interaction", "LateInteractionParams.verify", "refuses", REQUEST),
    Rule("a document has a query in the same engine", "get_late_interaction_engine_index",
         "refuses, if queries are known", f"{VALIDATION}::test_document_needs_a_query_that_was_sent"),
    Rule("… the engine by crc32", "get_late_interaction_engine_index", "a function for the client",
         "client/test_late_interaction.py::test_all_of_a_query_go_to_one_engine"),
    Rule("late chunks: only token_embed, all rows", POOLING, "refuses", REQUEST),
    Rule("late chunks read no cache", POOLING, "rewrites", f"{DEFAULTS}::test_late_chunks_need_the_whole_prompt"),
    Rule("use_activation is True", POOLING, "rewrites",
         f"{DEFAULTS}::test_pooling_starts_from_what_the_task_wants"),
    Rule("token tasks read no cache", POOLING, "rewrites",
         f"{DEFAULTS}::test_pooling_starts_from_what_the_task_wants"),
    Rule("dimensions only for embeddings", POOLING, "refuses", REQUEST),
    Rule("dimensions only if they can be cut", POOLING, "refuses, if it is stated", UNSUPPORTED),
    Rule("dimensions at most those of the model", POOLING, "refuses, if they are stated",
         f"{VALIDATION}::test_dimensions_are_those_of_the_model_at_most"),
    Rule("step_tag_id only for step pooling", POOLING, NO_CONFIG),
    Rule("output_kind is final only", "PoolingParams.__post_init__", "codec", REQUEST),
    # The Rust frontend
    Rule("max_tokens is cut to the context", RUST, "not ours: the engine ends there with LENGTH"),
    Rule("disabled repetition detection is left out", RUST, "not ours: engines do nothing for it"),
    Rule("an empty set of allowed ids", RUST, "codec", FIELD),
    # Known of the engine
    Rule("token ids wait for the size of the vocabulary", "get_vocab_size", "a function for the client",
         f"{SIZE}::test_request_that_depends_on_the_vocabulary"),
    Rule("token ids in any form", "renderer", "rewrites", f"{TOKEN_IDS}::test_any_iterable_of_integers_is_a_prompt"),
]  # fmt: skip


def defined(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


@pytest.mark.parametrize("test", sorted({rule.test for rule in RULES if rule.test}))
def test_named_test_exists(test: str) -> None:
    file, name = test.split("::")

    assert name in defined(TESTS / file)


def test_every_rule_is_held_or_says_why_not() -> None:
    unexplained = [
        rule.what for rule in RULES if not rule.test and not rule.here.startswith("not ours: ")
    ]

    assert unexplained == []


def test_each_rule_is_there_once() -> None:
    assert len({(rule.what, rule.upstream) for rule in RULES}) == len(RULES)

"""Tables of fields that this server does not have, for all endpoints alike: the values that ask for
nothing, the fields that cannot change a reply, and the names in other projects.

`protocol.checked` reads these tables.  So a value that one endpoint accepts as "nothing" is
accepted by all of them, in the options of Ollama's protocol, too.
"""
# null, and these, mean that a field is not set.  The fields in REQUIRED must have a value.
EMPTY = "", [], {}
REQUIRED = {"prompt", "messages", "input", "tokens"}

# Fields that cannot change a reply of this server: any value is accepted, and none is read.
IGNORED = dict.fromkeys((
    # OpenAI
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "max_tool_calls",
    # Ollama: when to unload a model, and what happens at the end of the context
    "keep_alive", "truncate", "shift",
    # llama.cpp: where and how to compute; numbers of samplers that UNSUPPORTED leaves off
    "id_slot", "slot_id", "n_keep", "timings_per_token", "return_progress",
    "reasoning_format", "parse_tool_calls", "mirostat_tau", "mirostat_eta", "dynatemp_exponent",
    "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
    "xtc_threshold", "speculative.n_max", "speculative.n_min", "speculative.p_min",
    # vLLM, and LM Studio
    "priority", "request_id", "ttl", "draft_model"))

# Names under which a request may switch off the thoughts of a model
THOUGHTS = "reasoning_effort", "reasoning", "think", "thinking", "enable_thinking"

NONE, OFF, ZERO, ONE = (), (False,), (0,), (1,)
# Fields that are not supported, and their values that change nothing, besides EMPTY.  An endpoint
# that supports such a field has it in its own table, which takes precedence.
UNSUPPORTED = {
    "tools": NONE, "functions": NONE, "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"), "parallel_tool_calls": (True, False),
    "modalities": (["text"],), "audio": NONE, "images": NONE, "image_data": NONE,
    "prediction": NONE, "web_search_options": NONE, "documents": NONE, "suffix": NONE,
    "template": NONE, "chat_template": NONE, "context": NONE, "mm_processor_kwargs": NONE,
    "reasoning_effort": ("none",), "think": OFF, "enable_thinking": OFF,
    "reasoning": ({"effort": "none"}, {"effort": "none", "summary": "auto"}, {"enabled": False}),
    "thinking": (False, {"type": "disabled"}), "include_reasoning": OFF, "verbosity": ("medium",),
    "logit_bias": NONE, "best_of": ONE, "n": ONE, "echo": OFF, "logprobs": OFF,
    "top_logprobs": ZERO, "prompt_logprobs": NONE, "n_probs": ZERO, "post_sampling_probs": OFF,
    "include": NONE, "background": OFF, "previous_response_id": NONE, "conversation": NONE,
    "forget": OFF, "return_tokens": OFF, "return_token_ids": OFF, "raw": OFF,
    "return_tokens_as_token_ids": OFF, "continue_final_message": OFF,
    "add_generation_prompt": (True,), "add_special_tokens": (True,),
    "truncate_prompt_tokens": NONE, "ignore_eos": OFF, "min_tokens": ZERO, "stop_token_ids": NONE,
    "include_stop_str_in_output": OFF, "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "detokenize": (True,), "use_beam_search": OFF,
    "length_penalty": ONE, "early_stopping": OFF, "bad_words": NONE, "allowed_token_ids": NONE,
    "logits_processors": NONE, "lora": NONE, "typical_p": ONE, "tfs_z": ONE, "mirostat": ZERO,
    "min_keep": ZERO, "dynatemp_range": ZERO, "dry_multiplier": ZERO, "xtc_probability": ZERO,
    "top_n_sigma": (-1, 0), "n_indent": ZERO, "t_max_predict_ms": (0, -1),
    "penalize_newline": (True,), "rope_frequency_base": ZERO, "rope_frequency_scale": (0, 1),
    "transforms": NONE, "models": NONE, "provider": NONE, "plugins": NONE, "safe_prompt": OFF,
    "grammar": NONE, "json_schema": NONE, "guided_json": NONE, "guided_choice": NONE,
    "guided_regex": NONE, "guided_grammar": NONE, "structured_outputs": NONE,
    "_debug_render_only": OFF}

# The field or flag to use in place of another project's
SCHEMA = "use response_format with a JSON schema"
INSTEAD = {
    "json_schema": SCHEMA, "guided_json": SCHEMA, "structured_outputs": SCHEMA,
    "guided_choice": "use response_format with a JSON schema such as {\"enum\": [...]}",
    "grammar": SCHEMA, "guided_regex": SCHEMA, "guided_grammar": SCHEMA, "n_probs": "use logprobs",
    "return_token_ids": "use return_tokens", "template": "use --template of serve",
    "chat_template": "use --template of serve"}

# The field that asks for the form of an answer: its name in each protocol, and its place
FORMS = {"response_format": "response_format", "text": "text.format", "format": "format"}

# Names of the same field in other projects: the first one that an endpoint has is meant.
SAME = (
    ("max_tokens", "max_output_tokens", "num_predict", "max_completion_tokens", "n_predict",
     "max_new_tokens", "max_gen_len", "maxTokens", "maxOutputTokens"),
    ("seed", "random_seed"), ("temperature", "temp"), ("top_p", "topP"), ("top_k", "topK"),
    ("min_p", "minP"), ("stop", "stop_sequences", "stop_strings", "stopSequences"),
    ("repeat_penalty", "rep_pen", "repeatPenalty"),
    ("repeat_last_n", "penalty_last_n", "rep_pen_range"))

# Fields of a message that the model does not read: thoughts of earlier answers, which chat
# templates leave out, and notes of clients.  Any other one must be empty, or a value of the table.
OF_MESSAGE = ("role", "content", "name", "id", "type", "status", "phase", "reasoning_content",
              "reasoning", "reasoning_details", "thinking", "cache_control")
NOTHING_IN_MESSAGE = {"prefix": OFF, "partial": OFF}


def same(a, b):
    """Whether two JSON values are equal.  1 equals 1.0, but not true."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def is_empty(value):
    return value is None or any(type(value) is type(x) and value == x for x in EMPTY)


def asks_for_nothing(value, neutral):
    """Whether a value is empty or one of `neutral`.  Members that are null do not count."""
    if isinstance(value, dict):
        value = {key: x for key, x in value.items() if x is not None}
    return is_empty(value) or any(same(value, x) for x in neutral)


def instead(name, known):
    """A hint for a field that an endpoint with the fields `known` does not have: it names the field
    to send in its place.  Empty if there is none."""
    own = next((place for field, place in FORMS.items() if field in known), "format")
    return f"use {own}" if name in FORMS else INSTEAD.get(name, "").replace("response_format", own)


def own_name(name, known):
    """The name that an endpoint with the fields `known` has for this field; None if it has none"""
    for names in SAME:
        if name in names:
            return next((own for own in names if own in known), None)
    return None

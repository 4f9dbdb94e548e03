"""Chat templates of the forms that models of the Hub have."""
from models import CHATML

from nanoeuler_parts.chat.templates import ALPACA

SMOLLM = """
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}""".replace("\n{{ '<|im_start|>system", "{{ '<|im_start|>system").strip()

LLAMA_2 = r"""
{%- if messages[0]['role'] == 'system' %}
    {%- set rest = messages[1:] %}
    {%- set system = messages[0]['content'] %}
{%- else %}
    {%- set rest = messages %}
    {%- set system = false %}
{%- endif %}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('users and assistants take turns') }}
    {%- endif %}
    {%- set content = message['content'] %}
    {%- if loop.index0 == 0 and system != false %}
        {%- set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + content %}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}""".strip()

LLAMA_3 = r"""
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday's year: " + date_string + "\n\n" }}
{%- if tools is not none %}{{- "Environment: ipython\n" }}{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}""".strip()

QWEN_3 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, seeking=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.seeking and message.role == 'user' and message.content is string and not (
           message.content.startswith('<tool_response>') and
           message.content.endswith('</tool_response>')) %}
        {%- set ns.seeking = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and thought %}
            {{- '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}""".strip()

MISTRAL = r"""
{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message["role"] not in ("user", "assistant") %}
        {{- raise_exception("users and assistants only") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.last %}
            {{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system is defined %}
            {{- "[INST] " + system + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {%- generation %}
            {{- " " + message["content"] | trim + eos_token }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}""".strip()

GEMMA = r"""
{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'system' %}{% continue %}{% endif %}
{%- if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}
{%- set role = message['role'] %}{% endif %}
{{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}""".strip()

PHI_3 = r"""
{% for message in messages %}
{% if message['role'] == 'system' and message['content'] %}
{{ '<|system|>\n' + message['content'] + '<|end|>\n' -}}
{% elif message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + '<|end|>\n' -}}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n' + message['content'] + '<|end|>\n' -}}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|assistant|>\n' }}
{% else %}
{{ eos_token }}
{% endif %}""".strip()

ZEPHYR = r"""
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""".strip()

DEEPSEEK_R1 = r"""
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '<|user|>' + message['content'] }}
    {%- else %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|assistant|>' + content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\n' }}{%- endif %}""".strip()

NEMOTRON = r"""
{%- set ns = namespace(thinking=true) %}
{%- for message in messages if message.role == 'user' %}
    {%- if '/think' in message.content %}
        {%- set ns.thinking = true %}
    {%- elif '/no_think' in message.content %}
        {%- set ns.thinking = false %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'user' %}
        {{- message.content.replace('/think', '').replace('/no_think', '').strip() }}
    {%- elif '</think>' in message.content %}
        {{- message.content.split('</think>')[1].strip() }}
    {%- else %}
        {{- message.content.strip() }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\n' }}{%- if not ns.thinking %}{{- '(at once)' }}{%- endif %}""".strip()

QUOTED = "{% for m in messages %}{{ m | tojson }}{{ eos_token }}\n{% endfor %}>"     # as data
UPPER = "{% for m in messages %}{{ m.content | upper }}{{ eos_token }}{% endfor %}"  # transformed
LOOKED = ("{% for m in messages %}{% if 'please' in m.content %}<|user|>{% endif %}"
          "{{ m.content }}{{ eos_token }}{% endfor %}")                  # looks into what users say

TEMPLATES = dict(smollm=SMOLLM, chatml=CHATML, llama_2=LLAMA_2, llama_3=LLAMA_3, qwen_3=QWEN_3,
                 mistral=MISTRAL, gemma=GEMMA, phi_3=PHI_3, zephyr=ZEPHYR, quoted=QUOTED,
                 deepseek_r1=DEEPSEEK_R1, nemotron=NEMOTRON, upper=UPPER, looked=LOOKED,
                 alpaca=ALPACA)
THINKING = ("qwen_3", "deepseek_r1", "nemotron")         # they cut the thoughts from answers
SPECIALS = ("</s>", "<|im_start|>", "<|im_end|>", "<s>", "[INST]", "[/INST]", "<|eot_id|>",
            "<|start_header_id|>", "<|end_header_id|>", "<think>", "</think>", "<start_of_turn>",
            "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

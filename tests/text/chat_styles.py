"""Three chat templates in the styles found in the field, and conversations to render with them."""

from __future__ import annotations

from typing import Any

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
    {%- set ns = namespace(open=true) %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{- message.content }}{%- endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + ' ' }}{{ call.function.arguments | tojson }}
            {{- '</tool_call>' }}
        {%- endfor %}
        {%- set ns.open = false %}
    {%- endif %}
    {%- if not ns.open %}
        {{- '<|im_end|>\\n' }}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if date_string is not defined %}
    {%- set date_string = strftime_now("%Y") %}
{%- endif %}
{%- set loop_messages = messages %}
{%- for message in loop_messages %}
    {%- set content = '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' %}
    {{- content }}
{%- endfor %}
{{- 'Year: ' + date_string }}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
  {% if message['role'] == 'user' %}
    {{- '[INST] ' + message['content'] + ' [/INST]' }}
  {% elif message['role'] == 'assistant' %}
    {{ message['content'] + eos_token }}
  {% else %}
    {{ raise_exception('Only user and assistant roles are supported!') }}
{% endif %}
{% endfor %}
"""

STYLES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL}

PARTS = """\
{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}{% else %}
{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %};{% endfor %}
"""

PARTS_ONLY = "{% for m in messages %}{% for part in m.content %}{{ part['text'] }}|{% endfor %}{% endfor %}"

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "你好 <b>&</b> 😀 "}],
    [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi\n"},
        {"role": "user", "content": " and 你？"},
    ],
]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "天气 <now>", "parameters": {"b": 1, "a": 2}}}
]

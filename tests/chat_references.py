r"""Chat templates in the styles of well-known models, each beside a slow reference written by hand.

A reference gives the rendered conversation as pieces (text, does the model write it). "Writes" means: all that stands
after the prompt the template would give for generation, up to and including the end-of-turn mark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

Turns = list[dict[str, str]]
Pieces = Iterator[tuple[str, bool]]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chatml(turns: Turns) -> Pieces:
    for t in turns:
        yield f"<|im_start|>{t['role']}\n", False
        yield f"{t['content']}<|im_end|>", t["role"] == "assistant"
        yield "\n", False


LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' }}"
    "{% if loop.first and system %}{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{% endif %}"
    "{{ m.content | trim + ' [/INST]' }}{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def llama2(turns: Turns) -> Pieces:
    system = turns[0]["content"] if turns[0]["role"] == "system" else ""
    for i, t in enumerate(turns[1:] if system else turns):
        if t["role"] == "user":
            yield "<s>[INST] ", False
            if i == 0 and system:
                yield f"<<SYS>>\n{system}\n<</SYS>>\n\n", False
            yield f"{t['content'].strip()} [/INST]", False
        else:
            yield f" {t['content'].strip()} </s>", True


LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def llama3(turns: Turns) -> Pieces:
    yield "<s>", False
    for t in turns:
        yield f"<|start_header_id|>{t['role']}<|end_header_id|>\n\n", False
        yield f"{t['content'].strip()}<|eot_id|>", t["role"] == "assistant"


ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def zephyr(turns: Turns) -> Pieces:
    for t in turns:
        yield f"<|{t['role']}|>\n", False
        yield f"{t['content']}</s>", t["role"] == "assistant"
        yield "\n", False


GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set prefix = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set prefix = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def gemma(turns: Turns) -> Pieces:
    yield "<s>", False
    prefix = turns[0]["content"] + "\n\n" if turns[0]["role"] == "system" else ""
    for i, t in enumerate(turns[1:] if prefix else turns):
        model = t["role"] == "assistant"
        yield f"<start_of_turn>{'model' if model else t['role']}\n{prefix if i == 0 else ''}", False
        yield f"{t['content'].strip()}<end_of_turn>", model
        yield "\n", False


MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}"  # the system text stands in the last question only
    "{{ '[INST] ' + (system if rest[loop.index:] | selectattr('role', 'equalto', 'user') | list | length == 0 else '')"
    " + m.content + '[/INST]' }}{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)


def mistral(turns: Turns) -> Pieces:
    yield "<s>", False
    system = turns[0]["content"] + "\n\n" if turns[0]["role"] == "system" else ""
    last = max(i for i, t in enumerate(turns) if t["role"] == "user")
    for i, t in enumerate(turns):
        if t["role"] == "user":
            yield f"[INST] {system if i == last else ''}{t['content']}[/INST]", False
        elif t["role"] == "assistant":
            yield f" {t['content'].strip()}</s>", True


PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)


def phi(turns: Turns) -> Pieces:
    for i, t in enumerate(turns):
        yield f"<|{t['role']}|>\n", False
        answers = t["role"] == "assistant"
        if answers and i == len(turns) - 1:  # the end of the text is the last answer's to write
            yield f"{t['content']}<|end|>\n</s>", True
            return
        yield f"{t['content']}<|end|>", answers
        yield "\n", False
    yield "</s>", False


VICUNA = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content + ' ' }}{% set rest = messages[1:] %}"
    "{% else %}{{ 'A chat. ' }}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}{{ 'USER: ' + m.content | trim + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def vicuna(turns: Turns) -> Pieces:
    system = turns[0]["content"] if turns[0]["role"] == "system" else "A chat."
    yield f"{system} ", False
    for t in turns:
        if t["role"] == "user":
            yield f"USER: {t['content'].strip()} ", False
        elif t["role"] == "assistant":
            yield "ASSISTANT:", False
            yield f" {t['content'].strip()}</s>", True


# thoughts of earlier turns are dropped, the last turn always gets a block of thoughts, if an empty one
REASONING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% set body = m.content %}"
    "{% if m.role == 'assistant' %}"
    "{% set thought = '' %}{% if '</think>' in body %}"
    "{% set thought = body.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set body = body.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{% endif %}"
    "{{ body + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def reasoning(turns: Turns) -> Pieces:
    for i, t in enumerate(turns):
        yield f"<|im_start|>{t['role']}\n", False
        body, answers = t["content"], t["role"] == "assistant"
        if answers:
            thought = ""
            if "</think>" in body:
                thought = body.split("</think>")[0].split("<think>")[-1].strip("\n")
                body = body.split("</think>")[-1].lstrip("\n")
            if i == len(turns) - 1:
                body = f"<think>\n{thought}\n</think>\n\n{body}"
        yield f"{body}<|im_end|>", answers
        yield "\n", False


ALPACA = (  # neither special tokens nor a mark at the end of a turn nor a generation prompt
    "{% for m in messages %}{{ {'system': '', 'user': '### Instruction:\n', 'assistant': '### Response:\n'}[m.role]"
    " + m.content | trim + '\n\n' }}{% endfor %}"
)


def alpaca(turns: Turns) -> Pieces:
    heads = {"system": "", "user": "### Instruction:\n", "assistant": "### Response:\n"}
    for t in turns:
        yield heads[t["role"]], False
        yield t["content"].strip(), t["role"] == "assistant"
        yield "\n\n", False


TAGGED = (  # the template says itself what the model writes
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content | upper + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)


def tagged(turns: Turns) -> Pieces:
    for t in turns:
        yield f"<|im_start|>{t['role']}\n", False
        answers = t["role"] == "assistant"
        yield f"{t['content'].upper() if answers else t['content']}<|im_end|>", answers
        yield "\n", False


REFERENCES: dict[str, tuple[str, Callable[[Turns], Pieces]]] = {
    "chatml": (CHATML, chatml),
    "llama2": (LLAMA2, llama2),
    "llama3": (LLAMA3, llama3),
    "zephyr": (ZEPHYR, zephyr),
    "gemma": (GEMMA, gemma),
    "mistral": (MISTRAL, mistral),
    "phi": (PHI, phi),
    "vicuna": (VICUNA, vicuna),
    "reasoning": (REASONING, reasoning),
    "alpaca": (ALPACA, alpaca),
    "tagged": (TAGGED, tagged),
}
SPECIAL_TOKENS = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<start_of_turn>", "<end_of_turn>", "<unk>",
]  # fmt: skip

"""Conversations and prompts: rendered as transformers renders them, learnt where the assistant speaks, to the token."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from test_data import build, json_tokenizer, resolved, source
from trainer.data import IGNORED_LABEL, documents
from trainer.data.bad_records import BadRecordError
from trainer.data.chat import ChatTemplate, chat_template_of
from trainer.data.documents import Encoded, encoder_of
from trainer.data.readers import Record
from trainer.data.token_cache import TokenCache, entropy_nats, open_token_cache
from trainer.data.tokenizer import ByteTokenizer, JsonTokenizer, TextTokenizer

from trainyard.errors import InputError
from trainyard.spec.job import DataSource

LOOP = "{%- for message in messages %}"
CHATML = """
{%- for message in messages %}
    {{- '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"""

MARKED = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>\n' }}{% generation %}{{ message.content | trim + '<|end|>' }}{% endgeneration %}{{- '\n' }}
    {%- else %}
        {{- '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"""

FORGETFUL = """
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {{- message.content if loop.last else message.content.split('</think>')[-1] }}{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

TURNS = [
    {"role": "system", "content": "Be ü short."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye?"},
    {"role": "assistant", "content": "Bye."},
]


def chats(folder: Path, *conversations: list[dict[str, Any]], **more: Any) -> Path:
    """A jsonl file of conversations."""
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": messages, **more}) + "\n" for messages in conversations))
    return path


def template(text: str) -> ChatTemplate:
    """A template without a tokenizer's tokens, except for one."""
    return ChatTemplate(text, special_tokens={"bos_token": "<s>"}, where="here")


def cache_of(path: Path, text: str | None, **fields: Any) -> TokenCache:
    """A jsonl file's tokens, bytes by bytes."""
    return open_token_cache(
        [DataSource(path=str(path), format="jsonl", **fields)],
        ByteTokenizer(),
        path.parent / "cache",
        chat_template=None if text is None else template(text),
    )


def learnt_text(cache: TokenCache) -> list[str]:
    """Each stretch that is learnt, of a cache of bytes."""
    assert cache.learnt is not None
    learnt = np.concatenate([[False], cache.learnt[0 : len(cache.tokens)], [False]]).astype(int)
    borders = np.flatnonzero(np.diff(learnt))
    return [
        bytes(token for token in cache.tokens[begin:end] if token < 256).decode()
        for begin, end in zip(borders[::2].tolist(), borders[1::2].tolist(), strict=True)
    ]


def test_only_the_assistants_turns_are_learnt_without_markers_too(tmp_path: Path) -> None:
    path = chats(tmp_path, TURNS, TURNS[1:3])
    cache = cache_of(path, CHATML, messages_field="messages")
    text = bytes(cache.tokens[:].astype(np.uint8)).decode()
    rendered = "<|user|>\nHi<|end|>\n<|assistant|>\nHello!<|end|>\n"
    assert text == (
        f"<|system|>\nBe ü short.<|end|>\n{rendered}<|user|>\nBye?<|end|>\n<|assistant|>\nBye.<|end|>\n{rendered}"
    )
    assert learnt_text(cache) == ["Hello!<|end|>\n", "Bye.<|end|>\n", "Hello!<|end|>\n"]
    assert cache.document_ends.tolist() == [len(text.encode()) - len(rendered), len(text.encode())]
    everything = cache_of(path, CHATML, messages_field="messages", learn="all")
    assert everything.learnt is None and everything.tokens[:].tolist() == cache.tokens[:].tolist()
    assert everything.digest != cache.digest


def test_generation_markers_say_it_themselves(tmp_path: Path) -> None:
    cache = cache_of(chats(tmp_path, TURNS), MARKED, messages_field="messages")
    assert learnt_text(cache) == ["Hello!<|end|>", "Bye.<|end|>"]
    assert bytes(cache.tokens[:].astype(np.uint8)).startswith(b"<s><|system|>")
    assert b"generation" not in bytes(cache.tokens[:].astype(np.uint8))
    with_all = cache_of(chats(tmp_path, TURNS), MARKED, messages_field="messages", learn="all")
    assert with_all.tokens[:].tolist() == cache.tokens[:].tolist()


@pytest.mark.parametrize("text", [CHATML, MARKED])
def test_tokens_and_masks_are_those_of_transformers(tmp_path: Path, text: str) -> None:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    folder = json_tokenizer(tmp_path / "tokenizer", "Hello! Bye. <|assistant|>\n Hello! Hi\n" * 20)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|end|>", "<|assistant|>", "<|user|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": text}))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>")
    expected = theirs.apply_chat_template(
        TURNS, chat_template=text, return_dict=True, return_assistant_tokens_mask=text == MARKED
    )
    ours = open_token_cache(
        [DataSource(path=str(chats(tmp_path, TURNS)), format="jsonl", messages_field="messages")],
        JsonTokenizer(folder / "tokenizer.json"),
        tmp_path / "cache",
        chat_template=chat_template_of(None, folder / "tokenizer.json"),
    )
    assert ours.tokens[:].tolist() == expected["input_ids"]
    assert ours.learnt is not None
    if text == MARKED:
        assert ours.learnt[0 : len(ours.tokens)].astype(int).tolist() == expected["assistant_masks"]
    else:
        prompt = theirs.apply_chat_template(TURNS[:2], chat_template=text, return_dict=True, add_generation_prompt=True)
        assert int(np.argmax(ours.learnt[0 : len(ours.tokens)])) == len(prompt["input_ids"])


def test_a_template_that_rewrites_earlier_turns_is_refused_unless_it_has_markers(tmp_path: Path) -> None:
    thinking = [{**turn, "content": "hm</think>" * (turn["role"] == "assistant") + turn["content"]} for turn in TURNS]
    with pytest.raises(InputError, match=r"chats.jsonl:1: .* renders turn 3 differently .* or set learn: all"):
        cache_of(chats(tmp_path, thinking), FORGETFUL, messages_field="messages")
    assert cache_of(chats(tmp_path, thinking), FORGETFUL, messages_field="messages", learn="all").learnt is None
    # A conversation of one answer is not rewritten, so its mask is exact.
    assert learnt_text(cache_of(chats(tmp_path, thinking[:3]), FORGETFUL, messages_field="messages")) == [
        "hm</think>Hello!<|end|>"
    ]


def test_a_border_inside_a_token_is_refused(tmp_path: Path) -> None:
    folder = json_tokenizer(tmp_path / "tokenizer", "Bot: hello Bot: hello " * 50)
    plain = "{% for m in messages %}{{ m.content if m.role == 'user' else 'Bot: ' + m.content }}{% endfor %}"
    plain += "{% if add_generation_prompt %}Bot: {% endif %}"
    with pytest.raises(InputError, match=r"joins what lies on both sides .*'Bot: ' \| 'hello'"):
        open_token_cache(
            [
                DataSource(
                    path=str(
                        chats(tmp_path, [{"role": "user", "content": ""}, {"role": "assistant", "content": "hello"}])
                    ),
                    format="jsonl",
                    messages_field="messages",
                )
            ],
            JsonTokenizer(folder / "tokenizer.json"),
            tmp_path / "cache",
            chat_template=template(plain),
        )


def test_prompts_are_read_and_answers_learnt(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"question": "2+2=", "answer": "4"}\n{"question": "", "answer": "yes"}\n')
    cache = cache_of(path, None, prompt_field="question", text_field="answer")
    assert cache.tokens[:].tolist() == [*b"2+2=4", 256, *b"yes", 256]
    assert cache.learnt is not None
    assert cache.learnt[0:10].tolist() == [False] * 4 + [True] * 6
    assert cache.learnt[3:5].tolist() == [False, True]
    # 4, y, e, s and two ends are learnt.
    assert cache.unigram_entropy_nats == pytest.approx(entropy_nats(np.asarray([1, 1, 1, 1, 2])))
    assert cache_of(path, None, prompt_field="question", text_field="answer", learn="all").learnt is None


def test_labels_and_counts_follow_the_mask(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "p" * length, "text": "a" * (1 + length % 5)} for length in (3, 40, 7, 60, 1, 15, 22)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = [source(path, prompt_field="prompt")]
    for packing in (True, False):
        job = resolved({"train": train, "packing": packing, "document_masks": False, "shuffle": False})
        stream = build(job, tmp_path).train
        for batch in (batch for _ in range(3) for batch in stream.next_step()):
            counted = batch.labels[:, 1:] != IGNORED_LABEL
            assert batch.num_target_tokens == int(counted.sum()) > 0
            assert bool((counted.sum(dim=1) > 0).all()), "a sequence without a target"
            learnt = batch.input_ids[batch.labels != IGNORED_LABEL].tolist()
            assert set(learnt) <= {ord("a"), 256}
            assert batch.num_tokens >= batch.num_target_tokens


def test_parquet_holds_conversations_too(tmp_path: Path) -> None:
    calls = [None, None, [{"name": "look", "arguments": "{}"}]]
    messages = [{**turn, "tool_calls": call} for turn, call in zip(TURNS[:3], calls, strict=True)]
    parquet.write_table(pyarrow.table({"messages": [messages], "n": [1]}), tmp_path / "a.parquet")
    text = CHATML.replace("message.content +", "message.content + ('!' if message.tool_calls is defined else '') +")
    ours = open_token_cache(
        [DataSource(path=str(tmp_path / "a.parquet"), format="parquet", messages_field="messages")],
        ByteTokenizer(),
        tmp_path / "cache",
        chat_template=template(text),
    )
    assert learnt_text(ours) == ["Hello!!<|end|>\n"]


def test_tools_dates_and_json_reach_the_template(tmp_path: Path) -> None:
    text = (
        "{{ strftime_now('%Y-%m-%d') }}{{ tools | tojson }}{% generation %}{{ messages[0].content }}{% endgeneration %}"
    )
    path = chats(tmp_path, [{"role": "assistant", "content": "x"}], tools=[{"name": "<ü>"}])
    cache = cache_of(path, text, messages_field="messages")
    assert bytes(cache.tokens[:].astype(np.uint8)).decode() == '2024-07-26[{"name": "<ü>"}]x'


PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Hello!"}]},
]
"""As some chat services export their conversations."""


@pytest.mark.parametrize("printed", ["{{ message.content }}", "{{ message['content'] | trim }}"])
def test_content_in_parts_is_learnt_as_text_or_not_at_all(printed: str) -> None:
    """A template for plain text writes a list out as Python does, and nothing in it fails."""
    every = "{% for message in messages %}|" + printed + "{% endfor %}"
    for read in (template(every).text, template(every).render):
        with pytest.raises(BadRecordError, match=r"message 1 \(user\) has its content in parts.*data.chat_template"):
            read(PARTS)
    knowing = every.replace(printed, "{{ message.content[0].text }}")
    assert template(knowing).text(PARTS) == "|Hi|Hello!"
    assert template("{{ messages[0].content | tojson }}").text(PARTS) == '[{"type": "text", "text": "Hi"}]'


@pytest.mark.parametrize("content", [[1, 2], [], {"sum": 3}, [[1.5], [2]]])
def test_a_tools_answer_that_is_data_has_no_parts(content: Any) -> None:
    """Written as JSON, numbers in lists read as in Python; and another turn may say the same."""
    turns = [{"role": "user", "content": f"what is {content}?"}, {"role": "tool", "content": content}]
    every = template("{% for message in messages %}{{ message.content | tojson }}{% endfor %}")
    assert every.text(turns) == "".join(json.dumps(turn["content"]) for turn in turns)


CALLING = """{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}|\
{{ call.function.name }} WRITTEN{% endfor %}{% endfor %}"""


def test_a_tool_call_is_not_learnt_as_json_inside_json() -> None:
    """Chat services export the arguments as a string; templates that use `tojson` on them would write it out quoted."""

    def turns(arguments: Any) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]

    writing = template(CALLING.replace("WRITTEN", "{{ call.function.arguments | tojson }}"))
    assert writing.text(turns({"city": "Bern"})) == '?|weather {"city": "Bern"}'
    with pytest.raises(BadRecordError, match=r"message 2 \(assistant\) calls .* give the arguments as an object"):
        writing.text(turns('{"city": "Bern"}'))
    plain = template(CALLING.replace("WRITTEN", "{{ call.function.arguments }}"))
    assert plain.text(turns('{"city": "Bern"}')) == '?|weather {"city": "Bern"}'


TOOL = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (json.dumps([TOOL]), "'tools' must be a list of objects, is str; give no JSON in a string"),
        (TOOL, "'tools' must be a list of objects, is dict"),
        ([None], "'tools' must be a list of objects, one is NoneType"),
        ([json.dumps(TOOL)], "'tools' has one in a string, which the chat template writes as JSON once more"),
    ],
)
def test_tools_in_a_string_are_not_written_letter_by_letter(tools: Any, message: str) -> None:
    """As data sets with a column of text for them have it."""
    writing = template("{% for tool in tools or [] %}{{ tool | tojson }}|{% endfor %}" + CHATML)
    with pytest.raises(BadRecordError, match=message):
        writing.render(TURNS, tools)
    for none in (None, "", [], {}):
        assert writing.text(TURNS, none) == template(CHATML).text(TURNS)
    assert writing.text(TURNS, [TOOL]).startswith(json.dumps(TOOL) + "|")
    plain = template("{% for tool in tools or [] %}{{ tool }}{% endfor %}" + CHATML)
    assert plain.text(TURNS, [json.dumps(TOOL)]).startswith(json.dumps(TOOL))


def test_null_beside_a_tools_call_is_not_learnt_as_none() -> None:
    call = {"function": {"name": "weather", "arguments": {}}}
    turns = [{"role": "user", "content": "None?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    careless = template(CHATML.replace("message.content +", "message.content ~"))
    for read in (careless.text, careless.render):
        with pytest.raises(BadRecordError, match=r"message 2 \(assistant\) has null for content, .* writes as None"):
            read(turns)
    knowing = template(CHATML.replace("message.content +", "(message.content or '') +"))
    assert knowing.text(turns) == "<|user|>\nNone?<|end|>\n<|assistant|>\n<|end|>\n"
    picky = "{% if messages[-1].content == '' %}{{ raise_exception('say something') }}{% endif %}"
    assert template(picky + "{{ messages[0].content }}").text(turns) == "None?", "an empty string may be no answer"


@pytest.mark.parametrize("text", [CHATML, MARKED])
def test_a_message_that_the_template_passes_over_is_told(text: str) -> None:
    """Of a role that it doesn't know: nobody would see that the model never read it."""
    known = "{%- for message in messages if message.role in ('system', 'user', 'assistant') %}"
    choosy = template(text.replace(LOOP, known))
    assert choosy.render(TURNS).text == template(text).render(TURNS).text
    turns = [{"role": "developer", "content": " Answer in verse. "}, *TURNS[1:]]
    for read in (choosy.text, choosy.render):
        with pytest.raises(BadRecordError, match=r"leaves out message 1 \(developer\).*data\.chat_template"):
            read(turns)
    choosy.text([{"role": "developer", "content": " "}, *TURNS[1:]])


@pytest.mark.parametrize("learns_all", [False, True])
def test_a_template_that_changes_all_words_is_not_rendered_for_each_of_them(
    learns_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long conversation would take the square of its length: 200 turns 200 times."""
    changing = template(CHATML.replace("message.content +", "message.content | upper +"))
    turns = [{"role": role, "content": f"word {number}"} for number in range(20) for role in ("user", "assistant")]
    rendered, honest = list[int](), ChatTemplate._render

    def render(self: ChatTemplate, messages: Any, *given: Any, **named: Any) -> str:
        rendered.append(len(messages))
        return honest(self, messages, *given, **named)

    monkeypatch.setattr(ChatTemplate, "_render", render)
    (changing.text if learns_all else changing.render)(turns)
    assert len(rendered) == (2 if learns_all else 2 + len(turns)), "the whole twice, and to and with each answer"
    rendered.clear()
    known = "{%- for message in messages if message.role != 'tool' %}"
    choosy = template(CHATML.replace("message.content +", "message.content | upper +").replace(LOOP, known))
    with pytest.raises(BadRecordError, match=r"leaves out message 40 \(tool\)"):
        choosy.text([*turns[:-1], {"role": "tool", "content": "of it nothing"}])
    assert rendered == [40, 40, 39]


@pytest.mark.parametrize("text", [CHATML, MARKED])
def test_a_turn_of_weight_0_is_read_and_not_learnt(tmp_path: Path, text: str) -> None:
    """OpenAI's fine-tuning files say so of an assistant's turn."""
    turns = [*TURNS[:2], TURNS[2] | {"weight": 0}, TURNS[3], TURNS[4] | {"weight": 1}]
    every = learnt_text(cache_of(chats(tmp_path, TURNS), text, messages_field="messages"))
    assert len(every) == 2
    assert learnt_text(cache_of(chats(tmp_path, turns), text, messages_field="messages")) == every[1:]
    with pytest.raises(InputError, match=r"chats.jsonl:1: .*weight 0 \(not learnt\), and learn: all learns it"):
        cache_of(chats(tmp_path, turns), text, messages_field="messages", learn="all")
    with pytest.raises(BadRecordError, match=r"weight must be 0 \(not learnt\) or 1, is '0.5'"):
        template(text).render([*TURNS[:2], TURNS[2] | {"weight": 0.5}])
    twice = MARKED.replace("{% endgeneration %}", "{% endgeneration %}{% generation %}!{% endgeneration %}")
    with pytest.raises(BadRecordError, match="has 4 generation blocks for 2 turns of the assistant"):
        template(twice).render(turns)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "must be a list of messages with at least one, is empty"),
        ({"chat": []}, r"has no field 'messages' \(it has: chat\)"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "gpt", "content": "b"}]},
            r"has no turn of the assistant .*\(its roles: user, gpt; the one that counts is assistant\)",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": "[]"}]},
            r"message 1 \(assistant\): tool_calls must be a list of objects",
        ),
        ({"messages": [{"role": "user"}]}, r"message 1 \(user\) has no content"),
        (
            {"messages": [{"role": "user", "content": "\ud83d"}, {"role": "assistant", "content": "b"}]},
            "field 'messages' is no valid Unicode",
        ),
        ({"messages": ["hello"]}, "message 1 must be an object with role and content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, r"refuses it \(no tools here\)"),
    ],
)
def test_a_conversation_that_cannot_be_learnt_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": TURNS}) + "\n" + json.dumps(row) + "\n")
    text = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}" + CHATML
    with pytest.raises(InputError, match=rf"chats.jsonl:2: .*{message}") as caught:
        cache_of(path, text, messages_field="messages")
    assert "\n" not in str(caught.value)


def test_a_template_runs_in_a_sandbox() -> None:
    for text in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% include '/etc/passwd' %}"):
        with pytest.raises(BadRecordError, match="refuses it"):
            template(text).text(TURNS)


def test_where_a_template_comes_from(tmp_path: Path) -> None:
    tokenizer = json_tokenizer(tmp_path / "tokenizer") / "tokenizer.json"
    assert chat_template_of(None, tokenizer) is None and chat_template_of(None, None) is None
    config = {"bos_token": {"content": "<s>"}, "chat_template": [{"name": "default", "template": "{{ bos_token }}1"}]}
    tokenizer.with_name("tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "mine.jinja").write_text("{{ bos_token }}3")
    found = [chat_template_of(None, tokenizer)]
    tokenizer.with_name("chat_template.jinja").write_text("{{ bos_token }}2")
    found += [chat_template_of(None, tokenizer), chat_template_of(str(tmp_path / "mine.jinja"), tokenizer)]
    assert [one and one.text([]) for one in found] == ["<s>1", "<s>2", "<s>3"]
    with pytest.raises(InputError, match=r"data.chat_template .*nowhere: can't be read: No such file"):
        chat_template_of(str(tmp_path / "nowhere"), tokenizer)
    (tmp_path / "broken.jinja").write_text("{% for %}")
    with pytest.raises(InputError, match=r"broken.jinja: is not a Jinja template"):
        chat_template_of(str(tmp_path / "broken.jinja"), None)
    path = chats(tmp_path, TURNS)
    with pytest.raises(InputError, match="messages_field needs a chat template, and none is beside the tokenizer"):
        build(resolved({"train": [source(path, messages_field="messages")]}), tmp_path)


def test_special_tokens_of_older_tokenizers_reach_the_template(tmp_path: Path) -> None:
    tokenizer = json_tokenizer(tmp_path / "tokenizer") / "tokenizer.json"
    template_text = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    tokenizer.with_name("tokenizer_config.json").write_text(json.dumps({"chat_template": template_text}))
    assert JsonTokenizer(tokenizer).eos_id is None
    special = {"bos_token": "<s>", "eos_token": {"content": "<end>"}}
    tokenizer.with_name("special_tokens_map.json").write_text(json.dumps(special))
    found = chat_template_of(None, tokenizer)
    assert found is not None and found.text(TURNS[1:2]) == "<s>Hi<end>"
    assert JsonTokenizer(tokenizer).eos_id == 1


def test_fields_of_records_are_checked_in_the_spec() -> None:
    for fields, message in (
        ({"format": "text", "messages_field": "m"}, "messages_field belongs to format jsonl or parquet"),
        ({"format": "jsonl", "messages_field": "m", "prompt_field": "p"}, "give one"),
        ({"format": "jsonl", "learn": "all"}, "learn: all is for records with"),
    ):
        with pytest.raises(ValueError, match=message):
            DataSource.model_validate({"path": "x", **fields})


# ---------------------------------------------------------------- masks without the cost of every prefix

SPECIAL = ("<|user|>", "<|assistant|>", "<|end|>", "<s>")
WORDS = (
    *("Hello", " hello", "  ", "\n", " \n\n", "12345", "don't", "é", "e\u0301", "你好", "??", "\t", " "),
    *("end", "<|end|>", "<s>", "x<|end|>\nend|>"),
)


def _tokenizer(kind: str, folder: Path, added: list[Any]) -> JsonTokenizer:
    """A small one of a kind, with added tokens."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    split = pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s*[\r\n]+|\s+(?!\S)|\s+|."), "isolated")
    pieces: dict[str, Any] = {
        "bytes": pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        "prefixed": pre_tokenizers.ByteLevel(add_prefix_space=True),
        "sentence": pre_tokenizers.Metaspace(prepend_scheme="first"),
        "looking ahead": pre_tokenizers.Split(Regex(r"[a-z]+(?=\s)|[a-z]|\s+|."), "isolated"),
    }
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pieces[kind]
    if kind == "sentence":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind in ("bytes", "prefixed") else []
    texts = ["".join(WORDS) * 3, "Hello hello end user assistant \n 12345 " * 20]
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)  # type: ignore[call-arg]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(added)
    tokenizer.save(str(folder / "tokenizer.json"))
    return JsonTokenizer(folder / "tokenizer.json")


def _masked_by_prefixes(tokenizer: TextTokenizer, text: str, learnt: Sequence[tuple[int, int]]) -> Any:
    """Ids and mask as they are defined: what lies before a border, tokenized alone, is what the whole begins with."""
    (ids,) = tokenizer.encode_batch([text])
    mask = np.zeros(len(ids), dtype=bool)
    for border in (border for span in learnt for border in span):
        (before,) = tokenizer.encode_batch([text[:border]])
        if not np.array_equal(ids[: len(before)], before):
            return f"({text[max(0, border - 12) : border]!r} | {text[border : border + 12]!r})"
        mask[len(before) :] ^= True
    return ids.tolist(), mask.tolist()


def _random_chat(draw: random.Random, num_turns: int) -> list[dict[str, str]]:
    words = ["".join(draw.choices(WORDS, k=draw.randint(1, 6))) for _ in range(num_turns)]
    return [{"role": ("user", "assistant")[turn % 2], "content": word} for turn, word in enumerate(words)]


@pytest.mark.parametrize("kind", ["bytes", "prefixed", "sentence", "looking ahead", "no tokenizer"])
@pytest.mark.parametrize("added", ["plain", "greedy", "normalized", "whole words", "none"])
def test_masks_are_those_of_every_prefix_whatever_the_tokenizer(tmp_path: Path, kind: str, added: str) -> None:
    from tokenizers import AddedToken

    options: dict[str, dict[str, bool]] = {
        "plain": {"normalized": False},
        "greedy": {"normalized": False, "lstrip": True, "rstrip": True},
        "normalized": {"normalized": True},
        "whole words": {"normalized": False},
    }
    tokens = [] if added == "none" else [AddedToken(text, **options[added]) for text in SPECIAL]
    if added == "whole words":
        # "end" is a token of the model's own too, and one that is refused here hides it from the search.
        tokens += [AddedToken("<|end|>\n", normalized=False, single_word=True), AddedToken("end", normalized=False)]
    tokenizer = ByteTokenizer() if kind == "no tokenizer" else _tokenizer(kind, tmp_path, tokens)
    draw = random.Random(f"{kind} {added}")
    one = DataSource(path="chats", format="jsonl", messages_field="messages")
    good = 0
    for text in (CHATML, MARKED, CHATML.replace("|>\n", "|>")):
        chats = [_random_chat(draw, 2 * draw.randint(1, 8)) for _ in range(40)]
        rows = [Record(number, {"messages": messages}) for number, messages in enumerate(chats)]
        for messages, found in zip(chats, encoder_of(one, tokenizer, template(text)).encode(rows), strict=True):
            rendered = template(text).render(messages)
            expected = _masked_by_prefixes(tokenizer, rendered.text, rendered.learnt)
            if isinstance(found, BadRecordError):
                assert str(expected) in str(found)
            else:
                assert found is not None and found.learnt is not None
                assert (found.ids.tolist(), found.learnt.tolist()) == expected
                good += 1
    assert good > 10


@pytest.mark.parametrize("added", [True, False])
def test_long_chats_are_tokenized_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, added: bool) -> None:
    from tokenizers import AddedToken

    tokens = [AddedToken(text, normalized=False) for text in SPECIAL] if added else []
    tokenizer = _tokenizer("bytes", tmp_path, tokens)
    given: list[int] = []
    encode = tokenizer.encode_batch
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts: given.append(sum(map(len, texts))) or encode(texts))
    monkeypatch.setattr(documents, "_GROUP_CHARACTERS", 5000)
    messages = [{"role": ("user", "assistant")[turn % 2], "content": "Hello there. " * 15} for turn in range(100)]
    length = len(template(CHATML).text(messages))
    one = DataSource(path="chats", format="jsonl", messages_field="messages")
    (found,) = encoder_of(one, tokenizer, template(CHATML)).encode([Record(0, {"messages": messages})])
    assert isinstance(found, Encoded)
    if added:  # beside the whole, what lies between the last special token and each border
        assert sum(given) < length / 4
    else:  # all prefixes, but never many at once
        assert sum(given) > 10 * length and max(given) < 5000 + length

"""Greedy accuracy of a checkpoint on held-out conversations, as a Markdown table.

The histories before the last question hold the right answers, except in the free phrasings, where the model talks to
itself. Seeds, sums, system prompts and the free phrasings are not in the training data.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .free_phrasings import FREE, Free
from .generate import Document, Message, guess_tokens, system_prompt
from .skills import addition, counting, json_pairs, json_record, small_talk, word_list
from .talk import Talk, held_out

UNSEEN_SYSTEM = {
    "en": (
        "Act as a patient tutor. Pupils will tell you things about themselves, so listen closely.",
        "You're the concierge of a tiny hotel called Blue Anchor; guests value short replies.",
        "This is a rehearsal. Respond the way a calm radio operator would, with no small print.",
        "Your task: keep notes for the person who is typing, and give them back on request.",
    ),
    "zh": (
        "你现在扮演一位耐心的家教，学生会介绍自己，请仔细听。",
        "你是一家名叫蓝锚的小旅馆的前台，客人希望听到简短的回复。",
        "这是一次排练，请像冷静的电台播音员那样回应。",
        "你的任务是替打字的人做笔记，需要时再告诉他们。",
    ),
}


@dataclass
class Case:
    """A conversation that ends with the user's turn, and the check of the answer."""

    row: str
    lang: str
    messages: list[Message]
    check: Callable[[str], bool]
    limit: int = 64
    answer: str = ""
    ended: bool = False
    later: list[str] = field(default_factory=list)


def plain(text: str) -> str:
    return text.strip().rstrip(".。!！").casefold()


def has_han(text: str) -> bool:
    return bool(re.search(r"[\u4e00-\u9fff]", text))


def parse_json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def has_all(*pieces: str) -> Callable[[str], bool]:
    """Every piece is in the answer, and not only as a part of a longer word or number."""
    patterns = [re.compile(rf"(?<![0-9a-z]){re.escape(p.casefold())}(?![0-9a-z])") for p in pieces]
    return lambda text: all(p.search(text.casefold()) for p in patterns)


class Builder:
    """Builds the cases of one language from a seed."""

    def __init__(self, lang: str, seed: int) -> None:
        self.lang = lang
        self.rng = random.Random(f"held out {seed} {lang}")

    def start(self, row: int = 256, system: bool = True) -> Document:
        while True:
            document = Document(self.rng, self.lang, row)
            if document.talk.bot or (document.messages and not system):
                continue
            return document

    def facts(self, document: Document, count: int, together: bool = False) -> list[tuple[str, str]]:
        talk = document.talk
        items = []
        for _ in range(count):
            item = talk.new_fact()
            talk.known[item[0].key, item[1]] = item
            items.append(item)
        if together:
            document.add([talk.tell(items)])
        else:
            for item in items:
                document.add([talk.tell([item])])
        return [(fact.key, value) for fact, _, value in items]

    def question(self, document: Document, key: str) -> str:
        talk = document.talk
        fact = next(f for f, who, _ in talk.known.values() if f.key == key and not who)
        return talk.wrap_ask(talk.fill(self.rng.choice(fact.ask), ""))

    def case(self, row: str, document: Document, user: str, check: Callable[[str], bool], limit: int = 64) -> Case:
        return Case(row, self.lang, [*document.messages, ("user", user)], check, limit)

    def single(self, row: str, make: Callable[[Talk], list[tuple[str, str]]], limit: int = 120) -> Case:
        """One question without a history; the generator's answer is the right one."""
        document = self.start(128)
        user, reply = make(document.talk)[0]
        return self.case(row, document, user, lambda text, reply=reply: text.strip() == reply, limit)  # type: ignore[misc]

    def recall(self, row: str, others: int, system: str = "") -> Case:
        document = self.start(system=not system)
        if system:
            document.messages = [("system", system)]
        (key, value), *_ = self.facts(document, 1)
        for _ in range(others):
            document.filler()
        return self.case(row, document, self.question(document, key), has_all(value))

    def three(self) -> Case:
        document = self.start()
        facts = self.facts(document, 3, together=self.rng.random() < 0.5)
        document.filler()
        talk = document.talk
        asks = [talk.fill(self.rng.choice(f.ask[:4]), "") for f, _, _ in talk.known.values()]
        return self.case("three facts", document, talk.wrap_ask(talk.join(asks)), has_all(*(v for _, v in facts)), 96)

    def corrected(self) -> Case:
        document = self.start()
        facts = dict(self.facts(document, 2))
        document.filler()
        document.add([document.talk.fix()])
        document.filler()
        (key, new), *_ = [(f.key, v) for f, _, v in document.talk.known.values() if facts[f.key] != v] or list(
            facts.items()
        )
        return self.case("corrected", document, self.question(document, key), has_all(new))

    def far(self) -> Case:
        document = self.start(1024, system=False)
        facts = self.facts(document, 2)
        while sum(guess_tokens(text) * 0.85 + 6 for _, text in document.messages) < 640:
            document.filler()
        key, value = self.rng.choice(facts)
        return self.case("over 600 tokens", document, self.question(document, key), has_all(value))

    def never(self) -> Case:
        document = self.start()
        self.facts(document, 2)
        fact, who, _ = document.talk.new_fact()
        user = document.talk.wrap_ask(document.talk.fill(self.rng.choice(fact.ask), "", who))
        mark = "没有告诉" if self.lang == "zh" else "have not told"
        return self.case("never told", document, user, lambda text: mark in text)

    def sum_unseen(self) -> Case:
        while True:
            pair = self.rng.randint(0, 99), self.rng.randint(0, 99)
            if held_out(*pair):
                break
        case = self.single("addition", lambda talk: addition(talk, pair))
        case.check = has_all(str(sum(pair)))
        return case

    def json(self, row: str) -> Case:
        document = self.start(128)
        user, reply = (json_record if self.rng.random() < 0.6 else json_pairs)(document.talk)[0]
        wanted = json.loads(reply)
        if row == "JSON parses":
            return self.case(row, document, user, lambda text: isinstance(parse_json(text), dict), 120)
        return self.case(row, document, user, lambda text: parse_json(text) == wanted, 120)

    def language(self) -> Case:
        """Small talk under a system prompt in the other language."""
        document = self.start(system=False)
        zh = self.lang == "zh"
        document.messages = [("system", system_prompt(self.rng, not zh, 2))]
        user, _ = small_talk(document.talk)[0]
        return self.case("language kept", document, user, lambda text: has_han(text) == zh and bool(text))

    def all(self, count: int) -> list[Case]:
        cases: list[Case] = []
        for i in range(count):
            cases += [
                self.recall("two turns", 1),
                self.recall("six turns", 5),
                self.three(),
                self.corrected(),
                self.far(),
                self.recall("unseen system prompt", 2, UNSEEN_SYSTEM[self.lang][i % 4]),
                self.never(),
                self.single("repeat", lambda talk: word_list(talk, "repeat")),
                self.single("reverse", lambda talk: word_list(talk, "reverse")),
                self.sum_unseen(),
                self.single("count", lambda talk, room=430 if i % 5 == 0 else 130: counting(talk, room), 430),  # type: ignore[misc]
                self.json("JSON parses"),
                self.json("JSON exact"),
                self.language(),
            ]
        return cases


def check_free(free: Free) -> Callable[[str], bool]:
    """The check that a free phrasing names."""
    if free.kind == "has":
        return (
            has_all(*free.expected.split("|"))
            if free.lang == "en"
            else lambda t: all(p in t for p in free.expected.split("|"))
        )
    if free.kind == "any":
        return lambda text: any(p.casefold() in text.casefold() for p in free.expected.split("|"))
    if free.kind == "json":
        return lambda text: parse_json(text) == json.loads(free.expected)
    if free.kind == "long":
        return lambda text: len(text) >= int(free.expected)
    return lambda text: plain(text) == plain(free.expected)


class Greedy:
    """Greedy answers in batches of similar length."""

    def __init__(self, folder: Path, batch: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.batch = batch

    def run(self, cases: Iterable[Case]) -> None:
        """Fill in `answer` and `ended` of every case."""
        todo = []
        for case in cases:
            chat = [{"role": role, "content": text} for role, text in case.messages]
            prompt = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            todo.append((case.limit, self.tokenizer(prompt, add_special_tokens=False)["input_ids"], case))
        todo.sort(key=lambda one: (one[0], len(one[1])))
        while todo:
            group = [one for one in todo[: self.batch] if one[0] == todo[0][0]]
            todo = todo[len(group) :]
            inputs = self.tokenizer.pad({"input_ids": [ids for _, ids, _ in group]}, return_tensors="pt")
            length = inputs["input_ids"].shape[1]
            with torch.inference_mode():
                out = self.model.generate(
                    **inputs, do_sample=False, temperature=None, top_p=None, top_k=None, max_new_tokens=group[0][0], eos_token_id=[2, 0], pad_token_id=0
                )  # fmt: skip
            for (_, _, case), ids in zip(group, out[:, length:].tolist(), strict=True):
                case.ended = 2 in ids
                case.answer = self.tokenizer.decode(ids[: ids.index(2)] if case.ended else ids)


def run_free(greedy: Greedy) -> list[Case]:
    """The free phrasings, turn by turn with the model's own answers."""
    cases = [Case("free phrasings", f.lang, [("user", f.turns[0])], check_free(f), 512 if f.kind == "long" else 96, later=list(f.turns[1:])) for f in FREE]  # fmt: skip
    active = cases
    while active:
        greedy.run(active)
        active = [case for case in active if case.later]
        for case in active:
            case.messages += [("assistant", case.answer), ("user", case.later.pop(0))]
    return cases


def table(cases: list[Case]) -> str:
    """Percentages per row and language."""
    right: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        right[case.row][case.lang].append(case.check(case.answer))
        right["turn ended"][case.lang].append(case.ended)
    right["turn ended"] = right.pop("turn ended")
    lines = ["| greedy, % right | English | Chinese | cases |", "|---|---|---|---|"]
    for row, langs in right.items():
        cells = [f"{100 * sum(langs[lang]) / max(1, len(langs[lang])):.0f}" for lang in ("en", "zh")]
        lines.append(f"| {row} | {cells[0]} | {cells[1]} | {sum(map(len, langs.values()))} |")
    return "\n".join(lines)


def evaluate(folder: Path, count: int, seed: int, batch: int, wrong: int) -> str:
    """The table for one checkpoint; prints up to `wrong` wrong answers of each row."""
    greedy = Greedy(folder, batch)
    cases = [case for lang in ("en", "zh") for case in Builder(lang, seed).all(count)]
    greedy.run(cases)
    cases += run_free(greedy)
    shown: dict[str, int] = defaultdict(int)
    for case in cases:
        if not case.check(case.answer) and shown[case.row + case.lang] < wrong:
            shown[case.row + case.lang] += 1
            users = " / ".join(text for role, text in case.messages[-5:] if role == "user")
            print(f"[{case.row}] {users!r} -> {case.answer!r}")
    return table(cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=100, help="cases for each row and language")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wrong", type=int, default=0, help="wrong answers to print for each row and language")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(evaluate(args.folder, args.count, args.seed, args.batch, args.wrong))


if __name__ == "__main__":
    main()

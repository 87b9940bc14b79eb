"""Training conversations from a seed: the same seed always gives the same text.

A document is one conversation that fills a row of a given number of tokens. Which skills it mixes depends on the row:
short rows hold lists, sums and quick recall, long rows hold facts that are asked for many hundred tokens later.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

from . import lexicon_en, lexicon_zh
from .casual import casual, chat
from .skills import addition, counting, json_pairs, json_record, small_talk, tale, word_list
from .talk import Talk, Turn

Message = tuple[str, str]
ENGLISH_SHARE = 0.57
SYSTEM_SHARE = 0.5
OVERHEAD = 10  # tokens of role marks and line ends in one turn

MIX: dict[int, dict[str, float]] = {
    128: {"recall": 25, "people": 5, "lists": 23, "sums": 13, "json": 13, "small": 9, "mixed": 9, "count": 3},
    256: {"recall": 31, "people": 8, "gap": 16, "lists": 13, "sums": 5, "json": 10, "small": 5, "mixed": 8, "count": 4},
    512: {"recall": 18, "people": 8, "gap": 38, "lists": 6, "json": 6, "mixed": 7, "count": 7, "story": 10},
    1024: {"gap": 60, "recall": 14, "people": 8, "mixed": 8, "story": 7, "count": 3},
    2048: {"gap": 75, "recall": 10, "mixed": 10, "story": 5},
}

LOOSE, POLISH = 1, 2
POLISH_MIX: dict[int, dict[str, float]] = {
    128: {"recall": 20, "people": 4, "lists": 30, "sums": 6, "json": 22, "small": 15, "mixed": 8},
    256: {"recall": 25, "people": 4, "gap": 16, "lists": 22, "json": 16, "small": 8, "mixed": 8, "count": 1},
}


def guess_tokens(text: str) -> int:
    """A cheap upper-ish guess of the token count, so that the generator needs no tokenizer."""
    wide = sum(c > "\u2e80" for c in text)
    return wide + wide // 6 + int((len(text) - wide) / 3.1) + 1


def system_prompt(rng: random.Random, zh: bool, sentences: int, bot: str = "") -> str:
    """A system prompt of some sentences with slots filled at random."""
    words = lexicon_zh if zh else lexicon_en
    chosen = rng.sample(words.SYSTEM, min(sentences, len(words.SYSTEM)))
    parts = []
    if bot:
        parts.append(
            f"你的名字是{bot}。" if zh else rng.choice((f"Your name is {bot}.", f"You are {bot}, a helpful assistant."))
        )
    for template in chosen:
        parts.append(
            template.format(
                day=rng.choice(words.DAYS), month=rng.choice(words.MONTHS), place=rng.choice(words.PLACES),
                city=rng.choice(words.CITIES), food=rng.choice(words.FOODS), food2=rng.choice(words.FOODS), n=rng.randint(1, 99),
                thing=rng.choice(words.THINGS), animal=rng.choice(words.ANIMALS), name=rng.choice(words.NAMES),
                drink=rng.choice(words.DRINKS),
            )
        )  # fmt: skip
    return ("" if zh else " ").join(parts)


class Document:
    """Builds one conversation turn by turn until a row is full."""

    def __init__(self, rng: random.Random, lang: str, row: int, late: int = 0) -> None:
        self.rng, self.row, self.late = rng, row, late
        self.talk = Talk(rng, lang)
        if late:
            self.talk.unknown_share = 0.13
        self.messages: list[Message] = []
        self.used = 0
        share = 0.4 if row == 128 else SYSTEM_SHARE
        if rng.random() < share:
            zh = self.talk.zh if rng.random() < 0.92 else not self.talk.zh
            count = rng.choice((1, 1, 1, 2, 2, 3, 4)) if row < 512 or rng.random() < 0.75 else rng.randint(8, 26)
            if rng.random() < 0.12:
                self.talk.bot = self.talk.person()
            text = system_prompt(rng, zh, min(count, row // 40), self.talk.bot)
            self.messages.append(("system", text))
            self.used += guess_tokens(text) + OVERHEAD // 2

    @property
    def left(self) -> int:
        return self.row - self.used

    def add(self, turns: list[Turn]) -> None:
        for user, reply in turns:
            self.messages += [("user", user), ("assistant", reply)]
            self.used += guess_tokens(user) + guess_tokens(reply) + OVERHEAD

    def filler(self) -> None:
        """Any turn that does not touch what is remembered."""
        rng, talk = self.rng, self.talk
        if self.late and rng.random() < 0.2:
            self.add(casual(talk) if self.late < POLISH or rng.random() < 0.6 else [chat(talk)])
            return
        r = rng.random()
        if r < 0.3:
            self.add(word_list(talk))
        elif r < 0.5:
            self.add(addition(talk))
        elif r < 0.62:
            self.add(json_record(talk) if r < 0.56 else json_pairs(talk))
        elif r < 0.9:
            self.add(small_talk(talk))
        elif r < 0.96 or self.left < 250:
            self.add(counting(talk, min(60, self.left)))
        else:
            self.add(tale(talk, self.left - 100))

    def question(self, count: int = 1) -> None:
        """One question about what was told, in one of its forms."""
        rng, talk = self.rng, self.talk
        r = rng.random()
        if r < 0.045 and talk.own():
            self.add([talk.json_me()])
        elif r < 0.085 and talk.known:
            self.add([talk.check()])
        elif r < 0.13 and 0 < len(talk.known) <= 5 and self.row >= 256:
            self.add([talk.recap()])
        else:
            self.add([talk.ask(count)])

    def recall(self) -> None:
        """Telling, asking and correcting in a random order."""
        rng, talk = self.rng, self.talk
        most = 5 if self.row <= 256 else 9
        self.add([talk.tell([talk.new_fact() for _ in range(rng.choice((1, 1, 2, 2, 3)))])])
        while self.left > 0:
            if self.late and rng.random() < 0.14:
                self.add(casual(talk))
            r = rng.random()
            if r < 0.56:
                self.question(rng.choice((1, 1, 1, 1, 2, 2, 3)))
            elif r < 0.7 and len(talk.known) < most:
                self.add([talk.tell([talk.new_fact() for _ in range(rng.choice((1, 1, 2, 3)))])])
            elif r < 0.83:
                self.add([talk.fix()])
                if rng.random() < 0.4:
                    self.add([talk.ask(1, newest_first=rng.random() < 0.3)])
            else:
                self.filler()
            if rng.random() < 0.01:
                talk.switch("en" if talk.zh else "zh")

    def people(self) -> None:
        """Facts about several people and things, told in a row and then asked for."""
        rng, talk = self.rng, self.talk
        for _ in range(rng.choice((1, 2, 2, 3))):
            self.add([talk.tell([talk.new_fact(others=True) for _ in range(rng.choice((1, 2, 3)))])])
        while self.left > 0:
            r = rng.random()
            if r < 0.7:
                self.add([talk.ask(rng.choice((1, 1, 1, 2)))])
            elif r < 0.8:
                self.add([talk.fix()])
            elif r < 0.9 and len(talk.known) < 12:
                self.add([talk.tell([talk.new_fact(others=rng.random() < 0.7)])])
            else:
                self.filler()

    def gap(self) -> None:
        """Facts first, then many turns about something else, then questions; over again if there is room."""
        rng, talk = self.rng, self.talk
        while self.left > 0:
            for _ in range(rng.choice((1, 1, 2, 3))):
                if len(talk.known) < 9:
                    facts = [talk.new_fact(others=rng.random() < 0.12) for _ in range(rng.choice((1, 1, 2, 3, 3)))]
                    self.add([talk.tell(list({(f.key, w): (f, w, v) for f, w, v in facts}.values()))])
            if rng.random() < 0.25:
                self.add([talk.fix()])
            far = rng.random() < (0.75 if self.row >= 1024 else 0.4)
            until = 150 if far else max(60, self.left - rng.randint(40, 260))
            while self.left > until:
                self.filler()
                if far and rng.random() < 0.1:
                    self.question()
            for _ in range(rng.randint(3, 6)):
                self.question(rng.choice((1, 1, 1, 2, 3)))
            if rng.random() < 0.04:
                talk.switch("en" if talk.zh else "zh")

    def repeat(self, make: Callable[[], list[Turn]], other: float = 0.12) -> None:
        while self.left > 0:
            if self.rng.random() < other:
                self.filler()
            else:
                self.add(make())

    def mixed(self) -> None:
        """All skills in any order, with a fact or two among them."""
        rng, talk = self.rng, self.talk
        while self.left > 0:
            r = rng.random()
            if r < 0.2 and len(talk.known) < 5:
                self.add([talk.tell([talk.new_fact()])])
            elif r < 0.45:
                self.question()
            else:
                self.filler()
                if rng.random() < 0.02:
                    talk.switch("en" if talk.zh else "zh")

    def build(self, kind: str) -> list[Message]:
        talk, rng = self.talk, self.rng
        if kind == "lists":
            polish = self.late >= POLISH
            self.repeat(lambda: word_list(talk, "reverse" if polish and rng.random() < 0.35 else ""))
        elif kind == "sums":
            self.repeat(lambda: addition(talk), 0.05)
        elif kind == "only-sums":
            self.repeat(lambda: addition(talk), 0.0)
        elif kind == "json":
            self.repeat(lambda: json_record(talk) if rng.random() < 0.6 else json_pairs(talk))
        elif kind == "small":
            polish = self.late >= POLISH
            self.repeat(lambda: [chat(talk)] if polish and rng.random() < 0.5 else small_talk(talk), 0.2)
        elif kind == "count":
            self.repeat(lambda: counting(talk, max(20, self.left - 20)), 0.2)
        elif kind == "story":
            self.add(tale(talk, self.left))
            self.mixed()
        else:
            {"recall": self.recall, "people": self.people, "gap": self.gap, "mixed": self.mixed}[kind]()
        return self.messages


def conversation(rng: random.Random, row: int, only_sums: bool = False, late: int = 0) -> list[Message]:
    """One conversation that is about `row` tokens long or a little longer.

    `late` is 0 for the plain mix, `LOOSE` for looser talk and `POLISH` for more of what is learnt last.
    """
    lang = "en" if rng.random() < ENGLISH_SHARE else "zh"
    mix = dict(POLISH_MIX[row] if late >= POLISH and row in POLISH_MIX else MIX[row])
    if late and "count" in mix:
        mix["count"] *= 2
    kind = "only-sums" if only_sums else rng.choices(list(mix), weights=list(mix.values()))[0]
    return Document(rng, lang, row, late).build(kind)


def main() -> None:
    """Print some conversations, to look at them: python -m tools.demo_model.generate [seed] [row]."""
    rng = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    for _ in range(6):
        print("-" * 60)
        for role, text in conversation(rng, int(sys.argv[2]) if len(sys.argv) > 2 else 256):
            print(f"{role:>9}: {text}")


if __name__ == "__main__":
    main()

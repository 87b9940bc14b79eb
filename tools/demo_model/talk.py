"""One conversation's state and the turns that change it or ask about it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from types import ModuleType

from . import facts, lexicon_en, lexicon_zh, phrases_en, phrases_zh
from .facts import Fact

Turn = tuple[str, str]
Known = tuple[Fact, str, str]

ONSETS = "b br c ch d dr f fl g gr h j k kl l m n p pr r s sh st t tr v w y z".split()
VOWELS = "a e i o u a e i o ai ea oo ia".split()
CODAS = ("", "", "", "", "n", "r", "l", "s", "m", "k", "t", "x")
HAN = [bytes((row, cell)).decode("gb2312") for row in range(0xB0, 0xD7) for cell in range(0xA1, 0xFF)]
ZH_LABEL = {
    "name": "名字", "city": "城市", "age": "年龄", "job": "工作", "colour": "颜色", "food": "食物", "drink": "饮料",
    "animal": "动物", "sport": "运动", "hobby": "爱好", "number": "数字", "code": "暗号", "password": "密码",
    "room": "房间", "month": "月份", "instrument": "乐器", "country": "国家", "dog": "狗", "cat": "猫", "parrot": "鹦鹉",
    "horse": "马", "rabbit": "兔子", "hamster": "仓鼠", "sister": "姐姐", "brother": "哥哥", "little sister": "妹妹",
    "little brother": "弟弟", "friend": "朋友", "best friend": "好朋友", "teacher": "老师", "boss": "老板", "mother": "妈妈",
    "father": "爸爸", "daughter": "女儿", "son": "儿子", "neighbour": "邻居", "wife": "妻子", "husband": "丈夫",
}  # fmt: skip
NUMERIC = ("age", "number")
HELD_OUT_MODULUS = 23
HELD_OUT_REST = 5


def held_out(a: int, b: int) -> bool:
    """True for the sums that training never shows, whichever way round."""
    return (min(a, b) * 101 + max(a, b)) % HELD_OUT_MODULUS == HELD_OUT_REST


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def pseudo_word(rng: random.Random, syllables: int) -> str:
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(syllables)) + rng.choice(CODAS)


class Talk:
    """State of one conversation: language, what the user has told, and the assistant's own name."""

    def __init__(self, rng: random.Random, lang: str) -> None:
        self.rng = rng
        self.known: dict[tuple[str, str], Known] = {}
        self.bot = ""
        self.lower = lang == "en" and rng.random() < 0.09
        self.bare = rng.random() < 0.12
        self.unknown_share = 0.06
        self.switch(lang)

    def switch(self, lang: str) -> None:
        """Go on in another language; what was told stays known."""
        self.zh = lang == "zh"
        self.words: ModuleType = lexicon_zh if self.zh else lexicon_en
        self.say: ModuleType = phrases_zh if self.zh else phrases_en
        self.me = facts.ME_ZH if self.zh else facts.ME_EN
        self.other = facts.OTHER_ZH if self.zh else facts.OTHER_EN
        self.things = facts.THING_ZH if self.zh else facts.THING_EN

    # values

    def person(self) -> str:
        """A name: some common ones, most never seen before, so that the model must copy."""
        rng, r = self.rng, self.rng.random()
        name: str
        if self.zh:
            if r < 0.13:
                name = rng.choice(self.words.NAMES)
            elif r < 0.42:
                name = rng.choice(self.words.SURNAMES) + "".join(rng.choices(self.words.GIVEN, k=rng.choice((1, 2, 2))))
            elif r < 0.66:
                name = "".join(rng.choices(self.words.GIVEN + self.words.SURNAMES, k=rng.choice((2, 2, 3))))
            elif r < 0.86:
                name = "".join(rng.choices(HAN, k=rng.choice((2, 2, 3))))
            else:
                name = self.latin_name()
        else:
            name = self.latin_name()
        return name.lower() if self.lower else name

    def latin_name(self) -> str:
        rng, r = self.rng, self.rng.random()
        if r < 0.36:
            return rng.choice(lexicon_en.NAMES)
        if r < 0.82:
            return capital(pseudo_word(rng, rng.choice((1, 2, 2, 3))))
        if r < 0.96:
            return capital("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 7))))
        return rng.choice(lexicon_en.NAMES) + " " + capital(pseudo_word(rng, 2))

    def value(self, pool: str) -> str:
        rng, w = self.rng, self.words
        if pool in ("person", "petname"):
            text = self.person()
        elif pool == "city":
            if rng.random() < 0.3:
                text = (
                    "".join(rng.choices(HAN if rng.random() < 0.5 else w.GIVEN, k=2))
                    if self.zh
                    else capital(pseudo_word(rng, rng.choice((2, 3))))
                )
            else:
                text = rng.choice(w.CITIES)
        elif pool == "age":
            text = str(rng.randint(4, 99))
        elif pool == "number":
            text = str(rng.choice((rng.randint(1, 99), rng.randint(1, 999))))
        elif pool == "code":
            r = rng.random()
            if r < 0.4:
                text = "".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ23456789", k=rng.randint(3, 6)))
            elif r < 0.7:
                text = str(rng.randint(1000, 99999))
            else:
                text = rng.choice(w.WORDS) if r < 0.85 else pseudo_word(rng, 2)
        else:
            pools = {
                "colour": w.COLOURS, "food": w.FOODS, "drink": w.DRINKS, "animal": w.ANIMALS, "sport": w.SPORTS, "hobby": w.HOBBIES,
                "month": w.MONTHS, "job": w.JOBS, "instrument": w.INSTRUMENTS, "country": w.COUNTRIES, "place": w.PLACES, "thing": w.THINGS, "word": w.WORDS,
            }  # fmt: skip
            text = rng.choice(pools[pool])
        return text.lower() if self.lower else text

    # wording

    def fill(self, clause: str, value: str, who: str = "") -> str:
        text = clause.format(v=value, p=who)
        if not self.zh and value[:1] in "aeiou" and f" a {value}" in text:
            text = text.replace(f" a {value}", f" an {value}")
        return text

    def join(self, parts: Sequence[str]) -> str:
        if len(parts) < 2:
            return parts[0]
        return str(self.say.COMMA.join(parts[:-1]) + self.say.AND + parts[-1])

    def sentence(self, text: str) -> str:
        """An assistant's sentence; a name in small letters keeps them, it is copied as it was typed."""
        return str((text if self.lower or self.zh else capital(text)) + self.say.STOP)

    def user(self, text: str) -> str:
        """The user's own manner: all small letters, or no punctuation at the end."""
        if self.lower:
            text = text.lower()
        if self.bare and text[-1] in ".?!。？！":
            text = text[:-1].rstrip()
        return text

    def wrap(self, table: Sequence[str], clause: str, **more: str) -> str:
        text = self.rng.choice(table).format(s=clause, S=capital(clause), **more)
        return self.user(text.replace("??", "?"))

    def answer(self, item: Known) -> str:
        fact, who, value = item
        about = (
            who.replace("my ", "your ")
            if who.startswith("my ")
            else who.replace("我", "你")
            if who[:1] == "我"
            else who
        )
        return self.fill(self.local(fact, who).answer, value, about)

    def local(self, fact: Fact, who: str) -> Fact:
        """The same kind of fact in the language spoken now."""
        table = self.me if not who else self.things if fact.pool == "place" else self.other
        return next((f for f in table if f.key == fact.key), fact)

    # facts

    def new_fact(self, others: bool = False) -> Known:
        """A fact about the user (or about somebody or something else) that has not been told yet."""
        rng = self.rng
        for _ in range(20):
            if others:
                if rng.random() < 0.3:
                    fact, who = self.things[0], rng.choice(self.words.THINGS)
                else:
                    people = [who for _, who, _ in self.known.values() if who and who not in self.words.THINGS]
                    who = rng.choice(people) if people and rng.random() < 0.4 else self.person()
                    fact = rng.choice(self.other)
            else:
                fact, who = rng.choice(self.me), ""
            if (fact.key, who) not in self.known:
                break
        return fact, who, self.value(fact.pool)

    def tell(self, items: Sequence[Known]) -> Turn:
        """The user tells facts, in one sentence or several; the assistant confirms."""
        rng = self.rng
        for item in items:
            self.known[item[0].key, item[1]] = item
        clauses = [self.fill(rng.choice(f.tell), v, who) for f, who, v in items]
        if len(clauses) > 1 and rng.random() < 0.35:
            stop = self.say.STOP if self.zh else self.say.STOP + " "
            text = self.user(stop.join(c if self.zh else capital(c) for c in clauses) + self.say.STOP)
        else:
            text = self.wrap(self.say.TELL_WRAP, self.join(clauses))
        if len(items) == 1 and items[0][0].key == "name" and not items[0][1] and rng.random() < 0.6:
            return text, rng.choice(self.say.NAME_ACK).format(v=items[0][2])
        return text, rng.choice(self.say.ACK).format(s=self.join([self.answer(i) for i in items]))

    def ask(self, count: int = 1, newest_first: bool = False) -> Turn:
        """The user asks for one or more of the facts told, or now and then for one never told."""
        rng = self.rng
        if not self.known or rng.random() < self.unknown_share:
            fact, who, _ = self.new_fact(bool(self.known) and rng.random() < 0.25)
            if (fact.key, who) not in self.known:
                clause = self.fill(rng.choice(fact.ask), "", who)
                return self.wrap_ask(clause), self.say.UNKNOWN.format(u=fact.unknown.format(p=who))
        pool = list(self.known.values())
        if newest_first:
            pool = pool[-count:]
        items = rng.sample(pool, min(count, len(pool)))
        clauses = []
        for fact, who, _ in items:
            asks = self.local(fact, who).ask
            clauses.append(self.fill(rng.choice(asks if len(items) == 1 else asks[:4]), "", who))
        text = self.join([self.answer(i) for i in items])
        if not self.zh and clauses[0].startswith("do you") and len(items) == 1:
            return self.wrap_ask(clauses[0]), self.say.YES.format(s=text)
        return self.wrap_ask(self.join(clauses)), self.sentence(text)

    def wrap_ask(self, clause: str) -> str:
        if clause.startswith(("tell me", "remind", "say my", "告诉我", "说说", "说出")):
            return self.user((clause if self.zh else capital(clause)) + self.say.STOP)
        return self.wrap(self.say.ASK_WRAP, clause)

    def fix(self) -> Turn:
        """The user corrects a fact; the newest value counts from here on."""
        rng = self.rng
        fact, who, old = rng.choice(list(self.known.values()))
        fact = self.local(fact, who)
        value = self.value(fact.pool)
        while value == old:
            value = self.value(fact.pool)
        item = (fact, who, value)
        self.known[fact.key, who] = item
        if not fact.fix or rng.random() < 0.5:
            clause = self.fill(rng.choice(fact.tell[:3]), value, who)
            table = self.say.FIX_NOT if rng.random() < 0.3 else self.say.FIX_WRAP
            text = self.wrap(table, clause, old=old)
        else:
            text = self.wrap(
                self.say.FIX_WRAP[:3] + ("{S}" + self.say.STOP,) * 3, self.fill(rng.choice(fact.fix), value, who)
            )
        return text, rng.choice(self.say.FIX_ACK).format(s=self.answer(item))

    def check(self) -> Turn:
        """The user asks whether a statement is true."""
        rng = self.rng
        fact, who, value = item = rng.choice(list(self.known.values()))
        fact = self.local(fact, who)
        right = rng.random() < 0.5
        claim = value if right else self.value(fact.pool)
        right = claim == value
        text = self.wrap(self.say.CHECK_WRAP, self.fill(fact.tell[0], claim, who))
        return text, (self.say.RIGHT if right else self.say.WRONG).format(s=self.answer(item))

    def recap(self) -> Turn:
        """The user asks for everything told so far."""
        text = self.user(self.rng.choice(self.say.RECAP))
        mine = list(self.known.values())
        if not mine:
            return text, self.say.NOTHING
        return text, self.sentence(self.join([self.answer(i) for i in mine]))

    def own(self) -> list[Known]:
        """Facts about the user that have a plain key."""
        return [i for i in self.known.values() if not i[1] and i[0].key in ZH_LABEL]

    def json_me(self) -> Turn:
        """The user asks for remembered facts as a JSON object."""
        rng = self.rng
        mine = self.own()
        items = rng.sample(mine, min(len(mine), rng.choice((1, 2, 2, 3))))
        keys = [ZH_LABEL[f.key] if self.zh else f.key for f, _, _ in items]
        text = self.user(rng.choice(self.say.JSON_ME).format(k=self.join(keys) if not self.zh else "和".join(keys)))
        pairs = {k: int(v) if f.pool in NUMERIC else v for k, (f, _, v) in zip(keys, items, strict=True)}
        return text, json.dumps(pairs, ensure_ascii=False)

"""Turns that need no memory: lists, sums, counting, JSON, small talk and stories."""

from __future__ import annotations

import json

from . import lexicon_en, lexicon_zh
from .stories import story
from .talk import HAN, NUMERIC, ZH_LABEL, Talk, Turn, capital, held_out, pseudo_word

JSON_KEYS_EN = tuple(
    "name age city job colour food drink pet size price title author year day month country animal number code status count id "
    "type language team score room place user active".split()
)
JSON_KEYS_ZH = tuple(
    "名字 年龄 城市 工作 颜色 食物 饮料 宠物 大小 价格 标题 作者 年份 日期 国家 动物 数量 编号 状态 类型 语言 分数 地点 用户".split()
)
ZH_FIELD = {"name": "姓名", **{k: ZH_LABEL[k] for k in ("city", "age", "job", "colour", "food", "dog")}, "code": "编号"}


def items(talk: Talk, count: int) -> list[str]:
    """Distinct list items: mostly common words, also names, numbers, letters and words never seen."""
    rng, r = talk.rng, talk.rng.random()
    if r < 0.62:
        found = rng.sample(talk.words.WORDS, min(count + 3, 60))
    elif r < 0.76:
        found = [talk.person() for _ in range(count + 3)]
    elif r < 0.82:
        found = [str(rng.randint(0, 99)) for _ in range(count + 3)]
    elif r < 0.85:
        found = rng.sample(
            "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if rng.random() < 0.5 else "abcdefghijklmnopqrstuvwxyz", count + 3
        )
    elif r < 0.93:
        if talk.zh:
            found = ["".join(rng.choices(HAN, k=rng.choice((1, 2)))) for _ in range(count + 3)]
        else:
            found = [pseudo_word(rng, rng.choice((1, 1, 2))) for _ in range(count + 3)]
    elif r < 0.96:
        found = rng.sample(lexicon_en.WORDS if talk.zh else lexicon_en.NAMES + lexicon_en.CITIES, count + 3)
    else:
        pools = (talk.words.CITIES, talk.words.FOODS, talk.words.COUNTRIES, talk.words.JOBS)
        found = rng.sample(rng.choice(pools), min(count + 3, 12))
    found = list(dict.fromkeys(found))[:count]
    if not talk.zh and rng.random() < 0.16:
        found = [capital(w) if rng.random() < 0.9 else w.upper() for w in found]
    return [w.lower() for w in found] if talk.lower else found


def separator(talk: Talk, words: list[str]) -> tuple[str, str]:
    """How a list is written: the separator, and the one before the last item."""
    choice = talk.rng.random()
    if talk.zh:
        sep = (
            "、"
            if choice < 0.4
            else "，"
            if choice < 0.64
            else " "
            if choice < 0.86
            else ","
            if choice < 0.92
            else ", "
        )
        return (sep, "和") if choice < 0.06 else (sep, sep)
    if any(" " in w for w in words):
        return ", ", ", "
    if choice < 0.5:
        return ", ", ", "
    if choice < 0.78:
        return " ", " "
    if choice < 0.93:
        return ", ", " and "
    return (",", ",") if choice < 0.96 else ("\n", "\n")


def write(words: list[str], sep: tuple[str, str]) -> str:
    return words[0] if len(words) == 1 else sep[0].join(words[:-1]) + sep[1] + words[-1]


def word_list(talk: Talk, kind: str = "") -> list[Turn]:
    """Repeat or reverse a list, sometimes followed by a second wish about the same list."""
    rng = talk.rng
    words = items(talk, rng.choice((2, 3, 3, 3, 4, 4, 4, 5, 5, 6, 7, 8)))
    sep = separator(talk, words)
    text = write(words, sep)
    if not kind:
        r = rng.random()
        kind = "repeat" if r < 0.42 else "reverse" if r < 0.86 else rng.choice(("first", "last", "many"))
    table = {
        "repeat": talk.say.REPEAT,
        "reverse": talk.say.REVERSE,
        "first": talk.say.FIRST,
        "last": talk.say.LAST,
        "many": talk.say.HOW_MANY,
    }
    template = rng.choice(table[kind])
    if sep[0] == "\n":
        template = (
            rng.choice([t for t in table[kind] if t.endswith("{l}")]).replace("{l}", "\n{l}").replace(" \n", "\n")
        )
    back = write(words[::-1], sep)
    reply = {"repeat": text, "reverse": back, "first": words[0], "last": words[-1], "many": str(len(words))}[kind]
    turns = [(talk.user(template.format(l=text)), reply)]
    if kind in ("repeat", "reverse"):
        if rng.random() < 0.1:
            turns.append((talk.user(rng.choice(talk.say.NOW_REVERSE)), back if kind == "repeat" else text))
        elif rng.random() < 0.05:
            turns.append((talk.user(rng.choice(talk.say.AGAIN)), reply))
    return turns


def addition(talk: Talk, pair: tuple[int, int] | None = None) -> list[Turn]:
    """Add two numbers up to 99; other sums are politely declined."""
    rng = talk.rng
    if pair is None:
        if rng.random() < 0.04:
            text = rng.choice(talk.say.OTHER_MATH).format(a=rng.randint(1, 99), b=rng.randint(1, 99))
            return [(talk.user(text), talk.say.OTHER_MATH_ANSWER)]
        while True:
            top = rng.choice((20, 99, 99, 99))
            pair = rng.randint(0, top), rng.randint(0, top)
            if not held_out(*pair):
                break
    a, b = pair
    reply = f"{a} + {b} = {a + b}"
    if max(a, b) <= 20 and rng.random() < 0.15:
        spell = talk.words.NUMBER_WORDS
        plain = (
            talk.say.ADD[:1]
            if talk.zh
            else (talk.say.ADD[0], "What's {a} plus {b}?", "{a} plus {b}", "Add {a} and {b}.")
        )
        return [(talk.user(rng.choice(plain).format(a=spell[a], b=spell[b])), reply)]
    return [(talk.user(rng.choice(talk.say.ADD).format(a=a, b=b)), reply)]


def counting(talk: Talk, room: int = 100) -> list[Turn]:
    """Count up or down; `room` is the number of tokens that may be used."""
    rng, say = talk.rng, talk.say
    most = max(4, room // (3 if talk.zh else 4))
    r = rng.random()
    span = rng.randint(3, 12) if r < 0.55 else rng.randint(10, 30) if r < 0.8 else rng.randint(25, 100)
    if most >= 100 and rng.random() < 0.3:
        span = rng.choice((50, 60, 90, 99, 100, 100))
    span = min(span, most, 100)
    kind = rng.random()
    if kind < 0.45:
        first, text = 1, rng.choice(say.COUNT_TO).format(b=span)
    else:
        first = 1 if rng.random() < 0.35 else rng.randint(0, 100 - span + 1)
        table = say.COUNT_FROM if kind < 0.86 else say.COUNT_DOWN
        text = rng.choice(table).format(a=first, b=first + span - 1)
    numbers = [str(n) for n in range(first, first + span)]
    if kind >= 0.86:
        numbers.reverse()
    return [(talk.user(text), say.COUNT_SEP.join(numbers) + say.COUNT_END)]


def json_record(talk: Talk) -> list[Turn]:
    """Turn facts about somebody, in the third person, into a JSON object."""
    rng, say, zh = talk.rng, talk.say, talk.zh
    person = talk.person()
    facts = rng.sample(talk.other, rng.choice((1, 1, 2, 2, 3, 4)))
    values = [talk.value(f.pool) for f in facts]
    label = (lambda k: ZH_FIELD[k]) if zh and rng.random() < 0.5 else (lambda k: k)
    record: dict[str, object] = {label("name"): person}
    for fact, value in zip(facts, values, strict=True):
        record[label(fact.key)] = int(value) if fact.pool in NUMERIC else value
    clauses: list[str] = []
    for fact, value in zip(facts, values, strict=True):
        clause = rng.choice(fact.tell)
        if clauses and clause.startswith("{p} ") and rng.random() < 0.5:
            clause = clause[4:]
        elif clauses and zh and clause.startswith("{p}") and rng.random() < 0.5:
            clause = clause[3:]
        clauses.append(talk.fill(clause, value, person))
    text = talk.say.COMMA.join([person, *values]) if rng.random() < 0.2 else talk.join(clauses)
    if rng.random() < 0.55:
        keys = list(record)
        if rng.random() < 0.5:
            rng.shuffle(keys)
        if len(keys) > 2 and rng.random() < 0.2:
            keys.pop()
        named = ("和" if rng.random() < 0.5 else "、").join(keys) if zh else talk.join(keys)
        user = rng.choice(say.JSON_KEYS).format(s=text, S=capital(text), k=named)
        return [(talk.user(user), json.dumps({k: record[k] for k in keys}, ensure_ascii=False))]
    if zh:
        record = {ZH_FIELD.get(k, k): v for k, v in record.items()}
    return [
        (talk.user(rng.choice(say.JSON_ASK).format(s=text, S=capital(text))), json.dumps(record, ensure_ascii=False))
    ]


def json_pairs(talk: Talk) -> list[Turn]:
    """Build a JSON object from keys and values given one by one, or from a list of words."""
    rng, say = talk.rng, talk.say
    if rng.random() < 0.18:
        words = items(talk, rng.choice((2, 3, 3, 4, 5)))
        text = rng.choice(say.JSON_LIST).format(l=write(words, separator(talk, words)))
        return [(talk.user(text), json.dumps({"words": words}, ensure_ascii=False))]
    keys = rng.sample(JSON_KEYS_ZH if talk.zh and rng.random() < 0.5 else JSON_KEYS_EN, rng.choice((1, 2, 2, 3, 3, 4)))
    values: list[object] = []
    for key in keys:
        r = rng.random()
        if (
            key in ("age", "年龄", "year", "年份", "count", "数量", "score", "分数", "price", "价格", "id", "number")
            or r < 0.12
        ):
            values.append(rng.randint(0, 99) if r < 0.8 else rng.randint(100, 2030))
        elif key in ("active",):
            values.append(r < 0.6)
        elif key in ("name", "名字", "author", "作者", "user", "用户") or r < 0.4:
            values.append(talk.person())
        elif key in ("city", "城市"):
            values.append(talk.value("city"))
        elif key in ("colour", "颜色", "food", "食物", "drink", "饮料", "job", "工作", "animal", "动物"):
            pool = {"颜色": "colour", "食物": "food", "饮料": "drink", "工作": "job", "动物": "animal"}.get(key, key)
            values.append(talk.value(pool))
        else:
            values.append(rng.choice(talk.words.WORDS))
    spoken = [json.dumps(v) if isinstance(v, bool) else str(v) for v in values]
    template = rng.choice(say.PAIR)
    is_pair = say.PAIR[-1] if not talk.zh else template
    pairs = talk.join([template.format(k=k, v=v) for k, v in zip(keys, spoken, strict=True)])
    where = talk.join([is_pair.format(k=k, v=v) for k, v in zip(keys, spoken, strict=True)])
    text = rng.choice(say.JSON_PAIRS).format(p=pairs, q=where)
    return [(talk.user(text), json.dumps(dict(zip(keys, values, strict=True)), ensure_ascii=False))]


def small_talk(talk: Talk) -> list[Turn]:
    """Greetings, thanks, who are you, capitals, and questions that are too hard."""
    rng, say = talk.rng, talk.say
    r = rng.random()
    slots = {p: talk.value(p) for p in ("food", "animal", "colour", "city", "instrument", "thing")}
    slots["name"] = talk.person()
    if r < 0.72:
        asks, replies = rng.choice(say.SMALL_TALK)
        ask, reply = rng.choice(asks).format(**slots), rng.choice(replies)
        if talk.bot:
            reply = reply.replace("the Weft demo model", talk.bot).replace("Weft 的演示模型", talk.bot)
            if "project" not in reply and "项目" not in reply:
                reply = reply.replace("Weft", talk.bot)
        return [(talk.user(ask), reply)]
    if r < 0.82:
        country = rng.choice(list(talk.words.CAPITALS))
        reply = say.CAPITAL_ANSWER.format(c=country, v=talk.words.CAPITALS[country])
        return [(talk.user(rng.choice(say.CAPITAL_ASK).format(c=country)), reply)]
    return [(talk.user(rng.choice(talk.words.UNKNOWN_QUESTIONS).format(**slots)), rng.choice(say.DONT_KNOW))]


def tale(talk: Talk, room: int) -> list[Turn]:
    """A story, short or long, about a hero that the user may name."""
    rng, say = talk.rng, talk.say
    hero, name = rng.choice(talk.words.ANIMALS), talk.person()
    about = f"一只叫{name}的{hero}" if talk.zh else f"a {hero} named {name}"
    if rng.random() < 0.4:
        about = hero if talk.zh else f"a {hero}"
        name = rng.choice(lexicon_zh.NAMES if talk.zh else lexicon_en.NAMES[:60])
    if not talk.zh:
        about = (
            about.replace("a owl", "an owl")
            .replace("a eagle", "an eagle")
            .replace("a elephant", "an elephant")
            .replace("a otter", "an otter")
        )
    can_long = room > 380
    r = rng.random()
    if can_long and r < 0.7:
        text = rng.choice(say.STORY_LONG if rng.random() < 0.5 else say.STORY_LONG_ABOUT).format(x=about)
        steps = rng.randint(13, 20)
    elif r < 0.3:
        text, steps = rng.choice(say.STORY_SHORT), rng.randint(1, 2)
    else:
        text = rng.choice(say.STORY if rng.random() < 0.5 else say.STORY_ABOUT).format(x=about)
        steps = rng.randint(3, 7)
    return [(talk.user(text), story(rng, talk.words, name, hero, steps))]

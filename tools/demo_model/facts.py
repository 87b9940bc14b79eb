"""What a user can tell about themselves, about others and about things: clause templates in two languages.

A clause has no capital and no full stop, so that the generator can join several of them into one sentence.
`{v}` is the value, `{p}` the person or thing the fact is about.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """One kind of fact: how it is told, asked for, answered and corrected."""

    key: str
    pool: str
    tell: tuple[str, ...]
    ask: tuple[str, ...]
    answer: str
    unknown: str
    fix: tuple[str, ...] = ()


def _en(noun: str, pool: str, key: str = "", *, tell: str = "", ask: str = "", fix: str = "") -> Fact:
    """A fact of the form "my noun is value"; extra clauses are separated by bars."""
    return Fact(
        key=key or noun.split()[-1],
        pool=pool,
        tell=(f"my {noun} is {{v}}", f"my {noun} is {{v}}", *filter(None, tell.split("|"))),
        ask=(
            f"what is my {noun}",
            f"what is my {noun}",
            f"what's my {noun}",
            f"whats my {noun}",
            f"do you remember my {noun}",
            f"do you know my {noun}",
            f"can you tell me my {noun}",
            f"tell me my {noun}",
            f"do you know what my {noun} is",
            f"remind me what my {noun} is",
            f"which {noun} did I tell you",
            f"what did I say my {noun} was",
            *filter(None, ask.split("|")),
        ),
        answer=f"your {noun} is {{v}}",
        unknown=f"your {noun}",
        fix=tuple(filter(None, fix.split("|"))),
    )


def _en_pet(pet: str) -> Fact:
    return Fact(
        key=pet,
        pool="petname",
        tell=(
            f"my {pet} is called {{v}}",
            f"my {pet} is named {{v}}",
            f"I have a {pet} called {{v}}",
            f"I have a {pet} named {{v}}",
            f"my {pet}'s name is {{v}}",
            f"the name of my {pet} is {{v}}",
        ),
        ask=(
            f"what is my {pet} called",
            f"what is my {pet}'s name",
            f"what's my {pet}'s name",
            f"what is the name of my {pet}",
            f"how is my {pet} called",
            f"do you remember the name of my {pet}",
            f"do you know my {pet}'s name",
            f"tell me the name of my {pet}",
            f"what did I call my {pet}",
            f"what's the name of my {pet}",
        ),
        answer=f"your {pet} is called {{v}}",
        unknown=f"the name of your {pet}",
        fix=(f"I renamed my {pet} to {{v}}",),
    )


def _en_person(who: str) -> Fact:
    return Fact(
        key=who,
        pool="person",
        tell=(
            f"my {who} is called {{v}}",
            f"my {who}'s name is {{v}}",
            f"my {who} is {{v}}",
            f"I have a {who} named {{v}}",
            f"the name of my {who} is {{v}}",
        ),
        ask=(
            f"what is my {who} called",
            f"what is my {who}'s name",
            f"what's my {who}'s name",
            f"who is my {who}",
            f"what is the name of my {who}",
            f"do you remember the name of my {who}",
            f"do you know my {who}'s name",
            f"tell me my {who}'s name",
        ),
        answer=f"your {who} is called {{v}}",
        unknown=f"the name of your {who}",
    )


_NAME_EN = Fact(
    "name",
    "person",
    (
        "my name is {v}", "my name is {v}", "my name is {v}", "my name's {v}", "I am {v}", "I'm {v}", "im {v}",
        "call me {v}", "you can call me {v}", "people call me {v}", "I am called {v}", "this is {v}",
        "they call me {v}", "everyone calls me {v}", "please call me {v}", "my first name is {v}",
    ),
    (
        "what is my name", "what is my name", "what's my name", "whats my name", "who am I", "do you remember my name",
        "what am I called", "do you know my name", "can you tell me my name", "what did I say my name was",
        "tell me my name", "say my name", "do you know who I am", "do you still know my name", "remind me of my name",
        "could you tell me what my name is", "what do people call me", "do you remember who I am",
        "what was my name",
    ),
    "your name is {v}",
    "your name",
    ("my name changed to {v}", "my name is now {v}", "call me {v} from now on"),
)  # fmt: skip
_CITY_EN = Fact(
    "city",
    "city",
    (
        "I live in {v}", "I live in {v}", "I am living in {v}", "my home is in {v}", "my home town is {v}",
        "I am from {v}", "I'm from {v}", "I come from {v}", "my city is {v}", "I live in a place called {v}",
    ),
    (
        "where do I live", "where do I live", "what city do I live in", "which city do I live in", "where am I from",
        "do you remember where I live", "do you know where I live", "where is my home", "what is my city",
        "tell me where I live", "which town do I live in", "what's my city", "where do I come from",
        "can you tell me where I live",
    ),
    "you live in {v}",
    "where you live",
    ("I moved to {v}", "I have moved to {v}", "I live in {v} now", "I just moved to {v}"),
)  # fmt: skip
_AGE_EN = Fact(
    "age",
    "age",
    ("I am {v} years old", "I'm {v} years old", "I am {v}", "I'm {v}", "my age is {v}", "I turned {v} this year"),
    (
        "how old am I", "how old am I", "what is my age", "what's my age", "do you know how old I am",
        "do you remember my age", "tell me my age", "how many years old am I", "what age am I",
        "do you remember how old I am",
    ),
    "you are {v} years old",
    "how old you are",
    ("I am {v} years old now", "I just turned {v}", "today I turned {v}"),
)  # fmt: skip
_JOB_EN = Fact(
    "job",
    "job",
    (
        "I work as a {v}", "my job is {v}", "I am a {v}", "I'm a {v}", "I earn my money as a {v}",
        "by profession I am a {v}", "I have a job as a {v}",
    ),
    (
        "what is my job", "what do I do for work", "what do I work as", "what's my job", "do you remember my job",
        "what do I do for a living", "what is my profession", "tell me my job", "what kind of work do I do",
        "do you know what I do for work",
    ),
    "you work as a {v}",
    "your job",
    ("I changed jobs, I work as a {v} now", "I became a {v}", "I work as a {v} now"),
)  # fmt: skip


def _en_like(noun: str, pool: str, verb: str) -> Fact:
    return _en(
        f"favourite {noun}",
        pool,
        noun,
        tell=f"my favorite {noun} is {{v}}|{verb}|{{v}} is my favourite {noun}",
        ask=f"what is my favorite {noun}|what's my favorite {noun}|which {noun} do I like best|what {noun} do I like most",
    )


ME_EN: tuple[Fact, ...] = (
    _NAME_EN,
    _NAME_EN,
    _NAME_EN,
    _CITY_EN,
    _CITY_EN,
    _AGE_EN,
    _JOB_EN,
    _en_like("colour", "colour", "the colour I like best is {v}|my favorite color is {v}|my favourite color is {v}"),
    _en_like("food", "food", "the food I like best is {v}|I love to eat {v}|my favorite dish is {v}"),
    _en_like("drink", "drink", "the drink I like best is {v}"),
    _en_like("animal", "animal", "the animal I like best is the {v}"),
    _en_like("sport", "sport", "the sport I like best is {v}"),
    _en("hobby", "hobby", tell="I like {v} in my free time|{v} is my hobby", ask="what do I like in my free time"),
    _en("lucky number", "number", "number", ask="which number is my lucky number|what number is lucky for me"),
    _en("code word", "code", "code", tell="the code word is {v}|my secret word is {v}", ask="what is the code word|what's the code word|what is my secret word"),
    _en("password", "code", tell="the password is {v}", ask="what is the password|what's the password"),
    _en("room number", "number", "room", tell="I am in room {v}|I am staying in room {v}", ask="which room am I in|what room am I in"),
    _en("birthday month", "month", "month", tell="I was born in {v}|my birthday is in {v}", ask="when is my birthday|in which month was I born|when was I born"),
    _en("instrument", "instrument", tell="I play the {v}", ask="which instrument do I play|what instrument do I play"),
    _en("country", "country", tell="the country I come from is {v}", ask="which country do I come from"),
    _en_pet("dog"), _en_pet("cat"), *(_en_pet(p) for p in ("dog", "cat", "parrot", "horse", "rabbit", "hamster")),
    *(_en_person(w) for w in ("sister", "brother", "friend", "best friend", "teacher", "boss", "mother", "father", "daughter", "son", "wife", "husband", "neighbour", "little sister", "little brother")),
)  # fmt: skip

OTHER_EN: tuple[Fact, ...] = (
    Fact("city", "city", ("{p} lives in {v}", "{p} is living in {v}", "{p}'s home is in {v}", "{p} comes from {v}"),
         ("where does {p} live", "do you know where {p} lives", "which city does {p} live in", "where is {p} from"), "{p} lives in {v}", "where {p} lives",
         ("{p} moved to {v}",)),
    Fact("job", "job", ("{p} works as a {v}", "{p} is a {v}", "{p}'s job is {v}"), ("what does {p} do", "what is {p}'s job", "what does {p} work as"),
         "{p} works as a {v}", "what {p} does", ("{p} became a {v}",)),
    Fact("age", "age", ("{p} is {v} years old", "{p} is {v}"), ("how old is {p}", "what is {p}'s age", "do you know how old {p} is"),
         "{p} is {v} years old", "how old {p} is", ("{p} turned {v}",)),
    Fact("food", "food", ("{p} likes {v}", "{p} loves {v}", "{p} likes to eat {v}"), ("what does {p} like", "what does {p} like to eat", "which food does {p} like"),
         "{p} likes {v}", "what {p} likes"),
    Fact("colour", "colour", ("{p}'s favourite colour is {v}", "the favourite colour of {p} is {v}"),
         ("what is {p}'s favourite colour", "which colour does {p} like best", "what's {p}'s favorite color"), "{p}'s favourite colour is {v}", "{p}'s favourite colour"),
    Fact("dog", "petname", ("{p}'s dog is called {v}", "{p} has a dog named {v}", "{p} has a dog called {v}"),
         ("what is {p}'s dog called", "what is the name of {p}'s dog", "how is {p}'s dog called"), "{p}'s dog is called {v}", "the name of {p}'s dog"),
    Fact("code", "code", ("{p}'s code is {v}", "the code of {p} is {v}"), ("what is {p}'s code", "what is the code of {p}", "which code does {p} have"),
         "{p}'s code is {v}", "{p}'s code"),
)  # fmt: skip

THING_EN: tuple[Fact, ...] = (
    Fact("place", "place", ("the {p} is in the {v}", "the {p} is in the {v}", "I put the {p} in the {v}", "you find the {p} in the {v}", "I left the {p} in the {v}"),
         ("where is the {p}", "where is the {p}", "where's the {p}", "where did I put the {p}", "do you know where the {p} is", "where can I find the {p}"),
         "the {p} is in the {v}", "where the {p} is", ("I moved the {p} to the {v}", "the {p} is now in the {v}")),
)  # fmt: skip


def _zh(noun: str, pool: str, key: str, *, tell: str = "", ask: str = "", fix: str = "") -> Fact:
    return Fact(
        key=key,
        pool=pool,
        tell=(f"我的{noun}是{{v}}", f"我的{noun}是{{v}}", f"我{noun}是{{v}}", *filter(None, tell.split("|"))),
        ask=(
            f"我的{noun}是什么",
            f"我的{noun}是什么",
            f"你还记得我的{noun}吗",
            f"你知道我的{noun}吗",
            f"我{noun}是什么",
            f"我的{noun}是什么来着",
            f"告诉我我的{noun}",
            f"我说过我的{noun}是什么",
            f"说说我的{noun}",
            *filter(None, ask.split("|")),
        ),
        answer=f"你的{noun}是{{v}}",
        unknown=f"你的{noun}",
        fix=(f"我的{noun}现在是{{v}}", f"我的{noun}改成了{{v}}", *filter(None, fix.split("|"))),
    )


def _zh_named(who: str, pool: str, key: str) -> Fact:
    own = f"我有一个{who}" if pool == "person" else f"我有一只{who}"
    return Fact(
        key=key,
        pool=pool,
        tell=(
            f"我的{who}叫{{v}}",
            f"我的{who}叫{{v}}",
            f"我的{who}的名字是{{v}}",
            f"{own}，叫{{v}}",
            f"我{who}叫{{v}}",
            f"我{who}的名字叫{{v}}",
        ),
        ask=(
            f"我的{who}叫什么",
            f"我的{who}叫什么名字",
            f"我{who}叫什么",
            f"我{who}叫什么名字",
            f"我的{who}的名字是什么",
            f"你还记得我的{who}叫什么吗",
            f"你知道我{who}的名字吗",
            f"告诉我我的{who}叫什么",
        ),
        answer=f"你的{who}叫{{v}}",
        unknown=f"你的{who}叫什么",
        fix=(f"我的{who}改名叫{{v}}了",),
    )


_NAME_ZH = Fact(
    "name",
    "person",
    ("我叫{v}", "我叫{v}", "我叫{v}", "我的名字是{v}", "我的名字叫{v}", "我是{v}", "叫我{v}就好", "叫我{v}吧", "大家都叫我{v}", "你可以叫我{v}", "我名叫{v}", "我名字是{v}"),
    ("我叫什么名字", "我叫什么名字", "我叫什么", "我的名字是什么", "你还记得我的名字吗", "你知道我叫什么吗", "我是谁", "我刚才说我叫什么", "你记得我是谁吗",
     "告诉我我的名字", "我的名字叫什么", "说出我的名字", "你还记得我叫什么吗", "你知道我的名字吗", "请问我叫什么", "我名字是什么"),
    "你叫{v}",
    "你叫什么名字",
    ("我改名叫{v}了", "我现在叫{v}", "以后请叫我{v}"),
)  # fmt: skip
_CITY_ZH = Fact(
    "city",
    "city",
    ("我住在{v}", "我住在{v}", "我家在{v}", "我来自{v}", "我现在住在{v}", "我是{v}人", "我在{v}生活"),
    ("我住在哪里", "我住在哪里", "我住在哪儿", "我住哪里", "我家在哪里", "我住在哪个城市", "你知道我住在哪里吗", "你还记得我住在哪里吗", "我来自哪里", "我是哪里人", "告诉我我住在哪里", "我在哪个城市生活"),
    "你住在{v}",
    "你住在哪里",
    ("我搬到{v}了", "我搬家了，现在住在{v}", "我已经搬到了{v}"),
)  # fmt: skip
_AGE_ZH = Fact(
    "age",
    "age",
    ("我{v}岁", "我今年{v}岁", "我{v}岁了", "我的年龄是{v}岁", "我今年{v}岁了"),
    ("我多大", "我几岁", "我今年多大", "我今年几岁了", "你知道我多大吗", "我的年龄是多少", "你还记得我几岁吗", "我多少岁", "我多大了"),
    "你{v}岁",
    "你多大",
    ("我现在{v}岁了", "我刚满{v}岁"),
)  # fmt: skip
_JOB_ZH = Fact(
    "job",
    "job",
    ("我是一名{v}", "我的工作是{v}", "我是{v}", "我的职业是{v}", "我当{v}", "我做{v}"),
    ("我的工作是什么", "我是做什么的", "我做什么工作", "我的职业是什么", "你知道我是做什么的吗", "你还记得我的工作吗", "我从事什么工作"),
    "你是一名{v}",
    "你是做什么的",
    ("我换工作了，现在是一名{v}", "我现在当{v}了"),
)  # fmt: skip


def _zh_like(noun: str, pool: str, key: str, verb: str = "") -> Fact:
    return Fact(
        key=key,
        pool=pool,
        tell=(f"我最喜欢的{noun}是{{v}}", f"我最喜欢的{noun}是{{v}}", f"我喜欢的{noun}是{{v}}", f"{{v}}是我最喜欢的{noun}", f"我最爱的{noun}是{{v}}", *filter(None, verb.split("|"))),
        ask=(
            f"我最喜欢的{noun}是什么",
            f"我最喜欢的{noun}是什么",
            f"我最喜欢什么{noun}",
            f"我喜欢什么{noun}",
            f"我喜欢的{noun}是什么",
            f"你还记得我最喜欢的{noun}吗",
            f"你知道我最喜欢什么{noun}吗",
            f"我最爱的{noun}是什么",
        ),
        answer=f"你最喜欢的{noun}是{{v}}",
        unknown=f"你最喜欢什么{noun}",
        fix=(f"我现在最喜欢的{noun}是{{v}}",),
    )  # fmt: skip


ME_ZH: tuple[Fact, ...] = (
    _NAME_ZH,
    _NAME_ZH,
    _NAME_ZH,
    _CITY_ZH,
    _CITY_ZH,
    _AGE_ZH,
    _JOB_ZH,
    _zh_like("颜色", "colour", "colour"),
    _zh_like("食物", "food", "food", "我最喜欢吃{v}|我爱吃{v}"),
    _zh_like("饮料", "drink", "drink", "我最喜欢喝{v}"),
    _zh_like("动物", "animal", "animal"),
    _zh_like("运动", "sport", "sport"),
    _zh("爱好", "hobby", "hobby", tell="我的兴趣是{v}", ask="我有什么爱好"),
    _zh("幸运数字", "number", "number", ask="我的幸运数字是多少"),
    _zh("暗号", "code", "code", tell="暗号是{v}", ask="暗号是什么"),
    _zh("密码", "code", "password", tell="密码是{v}", ask="密码是什么|我的密码是多少"),
    _zh("房间号", "number", "room", tell="我住{v}号房间|我的房间号码是{v}", ask="我的房间号是多少|我住几号房间"),
    _zh("生日月份", "month", "month", tell="我的生日在{v}|我是{v}出生的", ask="我的生日在几月|我是几月出生的"),
    _zh("乐器", "instrument", "instrument", tell="我会弹的乐器是{v}", ask="我会什么乐器"),
    _zh("国家", "country", "country", tell="我的祖国是{v}", ask="我是哪个国家的"),
    *(_zh_named(p, "petname", k) for p, k in (("狗", "dog"), ("猫", "cat"), ("狗", "dog"), ("猫", "cat"), ("鹦鹉", "parrot"), ("马", "horse"), ("兔子", "rabbit"), ("仓鼠", "hamster"))),
    *(_zh_named(p, "person", k) for p, k in (("姐姐", "sister"), ("哥哥", "brother"), ("妹妹", "little sister"), ("弟弟", "little brother"), ("朋友", "friend"), ("好朋友", "best friend"), ("老师", "teacher"), ("老板", "boss"), ("妈妈", "mother"), ("爸爸", "father"), ("女儿", "daughter"), ("儿子", "son"), ("邻居", "neighbour"), ("妻子", "wife"), ("丈夫", "husband"))),
)  # fmt: skip

OTHER_ZH: tuple[Fact, ...] = (
    Fact("city", "city", ("{p}住在{v}", "{p}家在{v}", "{p}来自{v}", "{p}在{v}生活"), ("{p}住在哪里", "{p}住在哪儿", "{p}住在哪个城市", "你知道{p}住在哪里吗", "{p}来自哪里"),
         "{p}住在{v}", "{p}住在哪里", ("{p}搬到{v}了",)),
    Fact("job", "job", ("{p}是一名{v}", "{p}的工作是{v}", "{p}的职业是{v}"), ("{p}是做什么的", "{p}的工作是什么", "{p}做什么工作"), "{p}是一名{v}", "{p}是做什么的",
         ("{p}现在是一名{v}了",)),
    Fact("age", "age", ("{p}{v}岁", "{p}今年{v}岁"), ("{p}多大", "{p}几岁", "{p}今年几岁了"), "{p}{v}岁", "{p}多大", ("{p}满{v}岁了",)),
    Fact("food", "food", ("{p}喜欢吃{v}", "{p}爱吃{v}", "{p}最喜欢吃{v}"), ("{p}喜欢吃什么", "{p}爱吃什么", "{p}最喜欢吃什么"), "{p}喜欢吃{v}", "{p}喜欢吃什么"),
    Fact("colour", "colour", ("{p}最喜欢的颜色是{v}", "{p}喜欢{v}"), ("{p}最喜欢的颜色是什么", "{p}喜欢什么颜色"), "{p}最喜欢的颜色是{v}", "{p}最喜欢什么颜色"),
    Fact("dog", "petname", ("{p}的狗叫{v}", "{p}有一只狗，叫{v}"), ("{p}的狗叫什么", "{p}的狗叫什么名字", "{p}的狗的名字是什么"), "{p}的狗叫{v}", "{p}的狗叫什么"),
    Fact("code", "code", ("{p}的代码是{v}", "{p}的编号是{v}"), ("{p}的代码是什么", "{p}的编号是什么"), "{p}的代码是{v}", "{p}的代码"),
)  # fmt: skip

THING_ZH: tuple[Fact, ...] = (
    Fact("place", "place", ("{p}在{v}里", "{p}在{v}里", "我把{p}放在{v}里了", "我的{p}在{v}里"), ("{p}在哪里", "{p}在哪儿", "我把{p}放在哪里了", "你知道{p}在哪里吗", "我的{p}在哪里"),
         "{p}在{v}里", "{p}在哪里", ("我把{p}移到{v}里了", "{p}现在在{v}里")),
)  # fmt: skip

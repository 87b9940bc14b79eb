"""Looser talk, shown only late in training: several things in one message, remarks, indirect questions.

The first stages stay with one thing per message, which is where copying is learnt fastest.
"""

from __future__ import annotations

from .facts import Fact
from .talk import Talk, Turn, capital, held_out

REMEMBER_EN = (
    Fact("the number", "number", ("remember the number {v}", "the number is {v}", "keep the number {v} in mind"),
         ("what was the number", "which number did I give you", "what number did you keep in mind", "what is the number", "do you still know the number"),
         "the number is {v}", "the number"),
    Fact("the word", "word", ("remember the word {v}", "the word is {v}", "keep the word {v} in mind"),
         ("what was the word", "which word did I give you", "what word did you keep in mind", "what is the word", "do you still know the word"),
         "the word is {v}", "the word"),
)  # fmt: skip
REMEMBER_ZH = (
    Fact("the number", "number", ("记住数字{v}", "请记一下数字{v}", "数字是{v}", "帮我记住数字{v}"),
         ("数字是多少", "我让你记的数字是什么", "刚才的数字是什么", "你记住的数字是几", "我说的数字是多少"), "数字是{v}", "数字是多少"),
    Fact("the word", "word", ("记住词语{v}", "请记一下这个词：{v}", "词语是{v}", "帮我记住{v}这个词"),
         ("词语是什么", "我让你记的词是什么", "刚才的词是什么", "你记住的词是哪个"), "词语是{v}", "词语是什么"),
)  # fmt: skip
RELATIVES_EN = ("my sister", "my brother", "my mother", "my father", "my uncle", "my aunt", "my friend", "my neighbour", "my boss", "my son", "my daughter", "my wife", "my husband")  # fmt: skip
RELATIVES_ZH = (
    "我姐姐",
    "我哥哥",
    "我妈妈",
    "我爸爸",
    "我叔叔",
    "我阿姨",
    "我朋友",
    "我邻居",
    "我老板",
    "我儿子",
    "我女儿",
    "我妹妹",
    "我弟弟",
)
INDIRECT = {
    "name": "what my name is", "city": "where I live", "age": "how old I am", "job": "what my job is", "colour": "what my favourite colour is",
    "food": "what my favourite food is", "drink": "what my favourite drink is", "animal": "what my favourite animal is", "hobby": "what my hobby is",
    "number": "what my lucky number is", "code": "what my code word is", "password": "what my password is", "dog": "what my dog is called",
    "cat": "what my cat is called", "parrot": "what my parrot is called", "horse": "what my horse is called", "rabbit": "what my rabbit is called",
    "sister": "what my sister is called", "brother": "what my brother is called", "friend": "who my friend is", "teacher": "who my teacher is",
    "boss": "who my boss is", "the number": "what the number was", "the word": "what the word was",
}  # fmt: skip
ASK_EN = (
    "Could you remind me {i}?", "Can you still recall {i}?", "I wonder if you know {i}.", "Please tell me {i}.", "Let's see if you remember {i}.",
    "Do you have any idea {i}?", "I'd like to know {i}.", "Would you tell me {i}?", "Tell me {i}, please.", "Guess {i}!", "Just tell me {i}.",
    "Do you by any chance remember {i}?", "Can you tell me again {i}?", "Any idea {i}?", "I want to hear from you {i}.",
)  # fmt: skip
ASK_ZH = (
    "{q}呀？",
    "{q}啊？",
    "那么{q}呢？",
    "我想知道{q}。",
    "能不能告诉我{q}？",
    "你说说看，{q}？",
    "麻烦告诉我{q}。",
    "你还能想起{q}吗？",
    "猜猜{q}？",
    "提醒我一下，{q}？",
    "到底{q}呀？",
)
REMARK_EN = (
    "The weather is nice today.", "It is raining again.", "I went to the market this morning.", "I just had lunch.", "What a beautiful morning.", "My {thing} is broken.",
    "I saw a {animal} today.", "I ate some {food}.", "We drank {drink} together.", "The train was late.", "I am reading a book.", "I like long walks.", "It is very cold here.",
    "Tomorrow is {day}.", "I bought a {colour} {thing}.", "My neighbour is very loud.", "I am learning the {instrument}.", "I slept well.", "I have to work today.",
    "The sun is shining.", "I am waiting for the bus.", "I cooked {food} yesterday.", "The {animal} is a funny animal, don't you think?", "Nice weather, right?", "Holidays are great.",
)  # fmt: skip
REMARK_ZH = (
    "今天天气很好。", "又下雨了。", "我早上去了市场。", "我刚吃完午饭。", "早晨真美。", "我的{thing}坏了。", "我今天看到一只{animal}。", "我吃了一些{food}。", "我们一起喝了{drink}。", "火车晚点了。",
    "我在看书。", "我喜欢散步。", "这里很冷。", "明天是{day}。", "我买了一个{colour}的{thing}。", "邻居很吵。", "我在学{instrument}。", "我睡得很好。", "我今天要上班。", "太阳出来了。", "我在等车。",
    "昨天我做了{food}。", "{animal}真有趣，对不对？", "天气不错吧？", "放假真好。",
)  # fmt: skip
REPLY_EN = ("I see. What can I do for you?", "That sounds interesting.", "I see.")
REPLY_ZH = ("原来如此。有什么可以帮你的吗？", "听起来很有意思。", "原来如此。")
ADD_EN = (
    "I own {a} pens and buy {b}. How many pens is that?", "{a} and {b} together, please", "Put {a} and {b} together, what do you get?", "how much would {a} and {b} be",
    "If I get {a} coins and then {b} coins, how many is that?", "{a} more than {b} is?", "the total of {a} and {b}, please", "What would {a} plus {b} give?", "add: {a}, {b}",
)  # fmt: skip
ADD_ZH = (
    "我有{a}支笔，又买{b}支，现在共几支？",
    "{a}和{b}一共是多少呢",
    "{a}加{b}呢？",
    "把{a}跟{b}合起来是多少？",
    "先给我{a}块糖，再给{b}块，总共几块？",
    "{a}跟{b}加起来呢",
    "求一下{a}和{b}的总数",
)
COUNT_EN = ("The numbers from {a} to {b}, please.", "{a} to {b}, count please", "count: {a} to {b}", "Please start counting at {a} and stop at {b}.", "all numbers from {a} up to {b}", "From {a} to {b}, one by one.")  # fmt: skip
COUNT_ZH = (
    "请数一数{a}到{b}。",
    "{a}到{b}，请数数",
    "请写{a}到{b}",
    "从{a}起数，到{b}停。",
    "把数字{a}到{b}列出来。",
    "数数：{a}到{b}",
)
MEND_EN = (
    "{S}. Oh no, {t}.",
    "{S}. Sorry, I mean {t}.",
    "{S}. No, that's wrong, {t}.",
    "{S}, no, sorry, {t}.",
    "{S}. Wait, {t}.",
    "{S}... actually {t}.",
)
MEND_ZH = (
    "{s}。哦不，{t}。",
    "{s}。不好意思，{t}。",
    "{s}。错了，{t}。",
    "{s}，不对，{t}。",
    "{s}。等一下，{t}。",
    "{s}……其实{t}。",
)

CHAT_EN: tuple[tuple[str, str], ...] = (
    ("hey you|hi :)|heyy|hello!!|hey hey|Hi there :)|Hello hello|hi friend|good to see you|Hello again|oh hi|hey :-)|Hi! :)", "Hello! How can I help you?"),
    ("hey, what's up|sup|Hey! How are things?|hi, how's everything|how's life?|how are things going?|how have you been|hey, how are you doing today|hi! how are you doing?|How's your day?|you ok?", "I am fine, thank you. How are you?"),
    ("thanks so much, that was great|cheers|ty|thanks, you're great|that helped, thanks|thank you, you were a big help|awesome, thanks|Thanks for everything|you're the best, thanks|Thanks, that is all I needed|wow, thank you", "You are welcome!"),
    ("ok bye|bye for now|gotta go|see ya|alright, goodbye then|that's it for today, bye|well, bye|have a good one|okay, see you then|Okay, goodbye!|so long|bye, take care|I'm off, bye", "Goodbye! Have a nice day."),
    ("what exactly is this?|so who are you|and you are?|are you some kind of bot?|what kind of thing are you|tell me what you are|who exactly are you?|so, what are you then?|explain what you are|what sort of model are you?|what are you really?", "I am the Weft demo model, a very small language model."),
    ("do you have any name?|your name please|and your name is?|may I know your name?|so what do they call you?|what can I call you|does this bot have a name?|you have a name?|is there a name for you?", "My name is Weft."),
    ("what are you able to do?|what can this model do?|so what can you do for me?|show me what you can do|what are your talents?|what else can you do?", "I can remember what you tell me, repeat and reverse lists, add numbers, count, write JSON and tell stories."),
)  # fmt: skip
CHAT_ZH: tuple[tuple[str, str], ...] = (
    ("嘿嘿，你好|你好呀！|哈喽哈喽|嗨嗨|你好哇|又见面了|你好你好|哈喽！", "你好！有什么可以帮你的吗？"),
    ("你在干嘛？|在干什么呢？|忙吗？|最近忙什么？|你在做什么呀？|你现在忙不忙？", "我在这里，有什么可以帮你的吗？"),
    ("今天怎么样？|过得好不好？|你今天过得怎么样？|最近过得好吗|你好，过得还好吗？|嗨，今天好吗？", "我很好，谢谢。你呢？"),
    ("谢谢你啦|真谢谢你|太谢谢了！|谢谢啦|多谢多谢|辛苦了，谢谢|感谢你的帮助|真的很感谢|真是谢谢了|太感谢你啦！", "不客气！"),
    ("拜拜啦|那再见啦|先这样吧，再见|就这样，拜拜|我走了，再见|下次再聊|改天聊|好吧，拜拜|那先拜拜了", "再见！祝你愉快。"),
    ("你究竟是什么呀？|你是个什么东西？|你到底是谁？|你是哪位？|你是个机器人吧？|说说你是什么|你到底是什么？|你算是什么呢？", "我是 Weft 的演示模型，一个很小的语言模型。"),
    ("能告诉我你的名字吗？|可以说说你的名字吗？|你名字叫什么呀？|你叫什么呀|怎么叫你好呢？|该怎么称呼您？|能说一下你叫什么吗？|可以告诉我你的名字吗？", "我叫 Weft。"),
    ("你都会些什么？|你能干什么呀？|你有什么本事？|说说你能做什么", "我能记住你说的话，重复和倒序列表，做加法，数数，写JSON，还会讲故事。"),
)  # fmt: skip


def chat(talk: Talk) -> Turn:
    """Greetings and the like in a looser tone."""
    asks, reply = talk.rng.choice(CHAT_ZH if talk.zh else CHAT_EN)
    return talk.user(talk.rng.choice(asks.split("|"))), reply.replace(" is Weft", f" is {talk.bot or 'Weft'}")


def remember(talk: Talk) -> Turn:
    """Facts outside the usual tables: a number, a word, or something about a relative."""
    rng = talk.rng
    if rng.random() < 0.4:
        fact = rng.choice(REMEMBER_ZH if talk.zh else REMEMBER_EN)
        return talk.tell([(fact, "", talk.value(fact.pool))])
    who = rng.choice(RELATIVES_ZH if talk.zh else RELATIVES_EN)
    fact = rng.choice(talk.other[:4])
    return talk.tell([(fact, who, talk.value(fact.pool))])


def tell_and_ask(talk: Talk) -> Turn:
    """A fact and the question for it, or for an older one, in one message."""
    rng = talk.rng
    item = talk.new_fact()
    told, _ = talk.tell([item])
    fact, who, _ = wanted = item if rng.random() < 0.6 else rng.choice(list(talk.known.values()))
    fact = talk.local(fact, who)
    asks = [a for a in fact.ask if not a.startswith("do you")]
    asked = talk.wrap_ask(talk.fill(rng.choice(asks), "", who))
    if told[-1] not in ".!?。！？":
        told += talk.say.STOP
    return told + ("" if talk.zh else " ") + asked, talk.sentence(talk.answer(wanted))


def mend(talk: Talk) -> Turn:
    """A slip of the tongue, corrected in the same message."""
    rng = talk.rng
    fact, who, value = item = talk.new_fact()
    wrong, right = talk.value(fact.pool), value
    talk.known[fact.key, who] = item
    tell = rng.choice(fact.tell)
    first, second = talk.fill(tell, wrong, who), talk.fill(rng.choice((tell, fact.tell[0])), right, who)
    text = rng.choice(MEND_ZH if talk.zh else MEND_EN).format(s=first, S=capital(first), t=second)
    return talk.user(text), rng.choice(talk.say.ACK[:4]).format(s=talk.answer(item))


def ask_indirectly(talk: Talk) -> Turn:
    """Questions that are no questions by their grammar."""
    rng = talk.rng
    known = [i for i in talk.known.values() if not i[1] and (talk.zh or i[0].key in INDIRECT)]
    if not known:
        return remark(talk)
    fact, who, _ = item = rng.choice(known)
    if talk.zh:
        text = rng.choice(ASK_ZH).format(q=talk.local(fact, who).ask[0])
    else:
        text = rng.choice(ASK_EN).format(i=INDIRECT[fact.key])
    return talk.user(text), talk.sentence(talk.answer(item))


def remark(talk: Talk) -> Turn:
    """Something that asks for nothing."""
    rng = talk.rng
    slots = {p: talk.value(p) for p in ("thing", "animal", "food", "drink", "colour", "instrument")}
    text = rng.choice(REMARK_ZH if talk.zh else REMARK_EN).format(day=rng.choice(talk.words.DAYS), **slots)
    return talk.user(text), rng.choice(REPLY_ZH if talk.zh else REPLY_EN)


def numbers(talk: Talk) -> Turn:
    """Sums and counts in other words."""
    rng = talk.rng
    if rng.random() < 0.3:
        first, span = rng.randint(1, 60), rng.randint(4, 14)
        text = rng.choice(COUNT_ZH if talk.zh else COUNT_EN).format(a=first, b=first + span)
        return talk.user(text), talk.say.COUNT_SEP.join(str(n) for n in range(first, first + span + 1))
    while True:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        if not held_out(a, b):
            return talk.user(rng.choice(ADD_ZH if talk.zh else ADD_EN).format(a=a, b=b)), f"{a} + {b} = {a + b}"


def casual(talk: Talk) -> list[Turn]:
    """One turn of looser talk."""
    r = talk.rng.random()
    if r < 0.2:
        return [tell_and_ask(talk)]
    if r < 0.34:
        return [mend(talk)]
    if r < 0.5:
        return [remember(talk)]
    if r < 0.72:
        return [ask_indirectly(talk)]
    return [remark(talk)] if r < 0.86 else [numbers(talk)]

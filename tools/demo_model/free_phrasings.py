"""Sixty short chats written by hand, not by the generator: what a person may type in the first minutes.

Each is a language, the user's turns (the model answers every one) and what the last answer must be:
`has` all these pieces, `any` of these pieces, `is` this text (apart from a final stop), `json` this object, or `long` at
least so many characters.
"""

from __future__ import annotations

from typing import NamedTuple


class Free(NamedTuple):
    """One chat with what its last answer must be."""

    lang: str
    turns: tuple[str, ...]
    kind: str
    expected: str


FREE: tuple[Free, ...] = (
    Free("en", ("hey! how's it going",), "any", "fine|well|help"),
    Free("en", ("Heya :)",), "any", "hello|hi"),
    Free("en", ("Thanks a bunch, you've been great",), "any", "welcome|happy|glad"),
    Free("en", ("ok bye then",), "any", "bye"),
    Free("en", ("so what exactly are you?",), "any", "model"),
    Free("en", ("got a name?",), "any", "Weft"),
    Free("en", ("Hi, Mira here. I live in Bergen with my dog Bruno.", "In which town is my home?"), "has", "Bergen"),
    Free("en", ("My name is Tomas.", "Lovely day, isn't it?", "Do you happen to remember my name?"), "has", "Tomas"),
    Free("en", ("hello, I am Priya and I am 27", "and how old am I then?"), "has", "27"),
    Free("en", ("My favourite colour is teal and my favourite food is ramen.", "Which colour do I like the most?"), "has", "teal"),
    Free("en", ("I'm Jack. Wait, no, my name is John.", "So what's my name?"), "has", "John"),
    Free("en", ("My cat is called Pixel.", "What is 7 plus 5?", "And my cat, what was it called again?"), "has", "Pixel"),
    Free("en", ("The spare key is in the garage.", "Where did I leave the spare key?"), "has", "garage"),
    Free("en", ("I work as a nurse in Leeds.", "What's my job, and where do I live?"), "has", "nurse|Leeds"),
    Free("en", ("My sister Anna lives in Porto.", "Where does my sister live?"), "has", "Porto"),
    Free("en", ("Please remember the number 4711.", "Which number should you remember?"), "has", "4711"),
    Free("en", ("My name is Zed.", "I changed my mind, call me Max.", "Who am I?"), "has", "Max"),
    Free("en", ("Could you say these three words back to me: lamp, tiger, cloud",), "has", "lamp, tiger, cloud"),
    Free("en", ("apple pear plum - once more please, in the same order",), "is", "apple pear plum"),
    Free("en", ("Now the other way round please: one two three four",), "is", "four three two one"),
    Free("en", ("Take the list red, green, blue and give it to me backwards",), "has", "blue, green, red"),
    Free("en", ("if I have 23 marbles and win 19, how many do I have now?",), "has", "42"),
    Free("en", ("48 and 36 added up gives what",), "has", "84"),
    Free("en", ("whats 9+9",), "has", "18"),
    Free("en", ("Please count for me, starting at 5 and ending at 12.",), "has", "5, 6, 7, 8, 9, 10, 11, 12"),
    Free("en", ("1 to 10 please, all the numbers",), "has", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
    Free("en", ("I need some JSON: the name is Lena and the age is 24",), "json", '{"name": "Lena", "age": 24}'),
    Free("en", ("Tom is 31 years old and lives in Oslo. Represent that as a JSON object with name, age and city.",), "json",
         '{"name": "Tom", "age": 31, "city": "Oslo"}'),
    Free("en", ("I'd love to hear a long bedtime story about a brave rabbit",), "long", "500"),
    Free("en", ("Which city is France's capital?",), "has", "Paris"),
    Free("zh", ("哈喽，今天过得好吗？",), "any", "好|谢谢"),
    Free("zh", ("你好呀，在忙什么呢？",), "any", "好|帮|在"),
    Free("zh", ("真是太谢谢你啦",), "any", "不客气|高兴"),
    Free("zh", ("那就这样，拜拜啦",), "any", "再见"),
    Free("zh", ("你到底是个什么东西呀？",), "any", "模型"),
    Free("zh", ("可以告诉我你叫什么吗？",), "any", "Weft"),
    Free("zh", ("大家好，本人王小明，家住杭州。", "我家在哪个城市？"), "has", "杭州"),
    Free("zh", ("我叫李静。", "今天天气真不错。", "我刚刚说我叫什么来着？"), "has", "李静"),
    Free("zh", ("我今年二十五岁，不对，我26岁。", "我几岁了呀？"), "has", "26"),
    Free("zh", ("我最爱吃饺子，最喜欢的颜色是紫色。", "你说我爱吃什么？"), "has", "饺子"),
    Free("zh", ("我叫张伟。说错了，我叫张薇。", "那我叫什么名字呢？"), "has", "张薇"),
    Free("zh", ("我家的猫叫豆豆。", "3加4是几？", "还记得我家猫的名字不？"), "has", "豆豆"),
    Free("zh", ("钥匙我放在抽屉里了。", "我的钥匙在哪儿呀？"), "has", "抽屉"),
    Free("zh", ("我是一名医生，住在成都。", "我的职业是什么？我住在哪里？"), "has", "医生|成都"),
    Free("zh", ("我弟弟叫陈浩。", "谁是我的弟弟？"), "has", "陈浩"),
    Free("zh", ("请你记住数字8848。", "刚才让你记住的数字是多少？"), "has", "8848"),
    Free("zh", ("我住在武汉。", "上个月我搬去了厦门。", "现在我住哪里？"), "has", "厦门"),
    Free("zh", ("麻烦你照我的话说一遍：山、水、云",), "has", "山、水、云"),
    Free("zh", ("苹果 香蕉 葡萄，按原来的顺序再说一次",), "is", "苹果 香蕉 葡萄"),
    Free("zh", ("帮忙把这几个词反着念：春天、夏天、秋天、冬天",), "has", "冬天、秋天、夏天、春天"),
    Free("zh", ("红色，绿色，蓝色，倒过来应该怎么说？",), "has", "蓝色，绿色，红色"),
    Free("zh", ("我手里有23个球，再拿19个，总共多少个？",), "has", "42"),
    Free("zh", ("48跟36加在一起是多少呀",), "has", "84"),
    Free("zh", ("9加9等于？",), "has", "18"),
    Free("zh", ("麻烦你数一下数，从5开始到12结束。",), "has", "5、6、7、8、9、10、11、12"),
    Free("zh", ("把1到10都写出来",), "has", "1、2、3、4、5、6、7、8、9、10"),
    Free("zh", ("我需要一个JSON，name是李娜，age是24",), "json", '{"name": "李娜", "age": 24}'),
    Free("zh", ("赵敏31岁，住在西安。请用JSON表示，字段有name、age、city。",), "json", '{"name": "赵敏", "age": 31, "city": "西安"}'),
    Free("zh", ("想听一个关于勇敢小兔子的长故事",), "long", "200"),
    Free("zh", ("法国的首都叫什么？",), "has", "巴黎"),
)  # fmt: skip

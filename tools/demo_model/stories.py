"""Stories from sentence templates: the only long free text the model learns to write."""

from __future__ import annotations

import random
from types import ModuleType

OPEN_EN = (
    "Once upon a time there was a {adj} {animal} named {n}.",
    "Long ago, a {adj} {animal} called {n} lived near {city}.",
    "In a small house by the river lived a {adj} {animal} named {n}.",
    "There was once a {adj} {animal}, and everyone called it {n}.",
)
WISH_EN = (
    "{n} wanted to find the {thing} of the old king.",
    "One day {n} lost a golden {thing}.",
    "{n} dreamed of seeing the sea.",
    "One morning {n} found a map in the {place}.",
    "{n} had never left home, but that day everything changed.",
)
STEP_EN = (
    "First {n} walked through a dark forest and sang a little song.",
    "On the road {n} met a {animal2} who was looking for {food}.",
    "They shared some {food} and talked until the moon came up.",
    "In the night it rained, so {n} slept under a big tree.",
    "The next day they came to a bridge, but the bridge was broken.",
    "A {adj2} {animal3} helped them to build a new one.",
    "Behind the hill they saw a village with {colour} roofs.",
    "The people there gave {n} a warm {drink} and a soft bed.",
    "An old woman told them about a cave in the mountains.",
    "The cave was cold, and the wind made strange sounds.",
    "{n} was afraid, but did not turn back.",
    "Inside they found a {colour} door with a small lock.",
    "The key was hidden under a flat stone.",
    "Behind the door lay a {thing} and a letter.",
    "The letter said that friends are the best treasure.",
    "Then a storm came and the river grew wide.",
    "They built a small boat from wood and rope.",
    "The boat carried them past the tall towers of {city2}.",
    "On the other side a {animal2} waved at them.",
    "For three days they ate nothing but {food2}.",
    "At the market {n} traded the {thing2} for a lamp.",
    "The lamp gave a {colour2} light and showed the way.",
    "Some birds flew ahead and told them where to go.",
    "In the evening they made a fire and counted the stars.",
    "A tired farmer asked for help, and {n} worked in his field all day.",
    "As thanks the farmer gave them a bag of {food2}.",
)
END_EN = (
    "At last {n} came home, and all the friends had a big party.",
    "In the end {n} was happy and slept for a whole day.",
    "When {n} came home, the moon was shining over the roof.",
)
LAST_EN = (
    "And {n} never forgot that day.",
    "From that day on, {n} was never alone again.",
    "That is the story of {n}.",
    "The end.",
)
OPEN_ZH = (
    "从前，有一只{adj}{animal}，名叫{n}。",
    "很久以前，{city}附近住着一只{adj}{animal}，大家叫它{n}。",
    "在河边的小房子里，住着一只{adj}{animal}，名叫{n}。",
)
WISH_ZH = (
    "{n}想找到老国王的{thing}。",
    "有一天，{n}丢了一个金色的{thing}。",
    "{n}一直梦想去看大海。",
    "一天早上，{n}在{place}里发现了一张地图。",
    "{n}从来没有离开过家，可是那天一切都变了。",
)
STEP_ZH = (
    "首先，{n}穿过黑暗的森林，唱着一首小歌。",
    "在路上，{n}遇到了一只正在找{food}的{animal2}。",
    "它们一起吃了{food}，一直聊到月亮升起来。",
    "夜里下雨了，{n}就睡在一棵大树下面。",
    "第二天，它们来到一座桥前，可是桥断了。",
    "一只{adj2}{animal3}帮它们修好了桥。",
    "山的后面有一个村庄，屋顶都是{colour}的。",
    "村里的人给了{n}一杯热{drink}和一张软软的床。",
    "一位老奶奶告诉它们山里有一个山洞。",
    "山洞里很冷，风发出奇怪的声音。",
    "{n}有点害怕，但是没有回头。",
    "里面有一扇{colour}的门，上面有一把小锁。",
    "钥匙藏在一块平平的石头下面。",
    "门后面有一个{thing}和一封信。",
    "信上写着：朋友才是最好的宝贝。",
    "后来暴风雨来了，河水变得很宽。",
    "它们用木头和绳子做了一条小船。",
    "小船带着它们经过了{city2}的高塔。",
    "在河的另一边，一只{animal2}向它们招手。",
    "三天里，它们只吃{food2}。",
    "在市场上，{n}用{thing2}换了一盏灯。",
    "那盏灯发出{colour2}的光，照亮了道路。",
    "几只小鸟飞在前面，告诉它们该往哪里走。",
    "晚上，它们点起火，数天上的星星。",
    "一个疲惫的农民请求帮助，{n}就在田里干了一整天的活。",
    "为了感谢它们，农民送了一袋{food2}。",
)
END_ZH = (
    "最后，{n}回到了家，朋友们开了一个大聚会。",
    "最后，{n}非常高兴，睡了整整一天。",
    "{n}回到家的时候，月亮正照着屋顶。",
)
LAST_ZH = ("{n}永远不会忘记那一天。", "从那天起，{n}再也不孤单了。", "这就是{n}的故事。", "故事讲完了。")


def story(rng: random.Random, words: ModuleType, name: str, hero: str, steps: int) -> str:
    """A story of `steps` episodes in order, without repeating one, about the animal `hero` called `name`."""
    zh = words.__name__.endswith("_zh")
    opening, wish, step, end, last = (
        (OPEN_ZH, WISH_ZH, STEP_ZH, END_ZH, LAST_ZH) if zh else (OPEN_EN, WISH_EN, STEP_EN, END_EN, LAST_EN)
    )
    chosen = sorted(rng.sample(range(len(step)), min(steps, len(step))))
    parts = [rng.choice(opening), rng.choice(wish), *(step[i] for i in chosen), rng.choice(end), rng.choice(last)]
    slots = {
        "n": name,
        "animal": hero,
        "animal2": rng.choice(words.ANIMALS),
        "animal3": rng.choice(words.ANIMALS),
        "adj": rng.choice(words.ADJECTIVES),
        "adj2": rng.choice(words.ADJECTIVES),
        "city": rng.choice(words.CITIES),
        "city2": rng.choice(words.CITIES),
        "thing": rng.choice(words.THINGS),
        "thing2": rng.choice(words.THINGS),
        "place": rng.choice(words.PLACES),
        "food": rng.choice(words.FOODS),
        "food2": rng.choice(words.FOODS),
        "drink": rng.choice(words.DRINKS),
        "colour": rng.choice(words.COLOURS),
        "colour2": rng.choice(words.COLOURS),
    }
    return ("" if zh else " ").join(parts).format(**slots)

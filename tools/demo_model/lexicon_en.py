"""English word pools of the data generator."""

NAMES = tuple(
    """Mira Tomas Anna Ben Clara David Emma Felix Grace Henry Ivy Jack Kate Leo Lena Max Nina Oscar Paul Rosa Sam Tom Uma
    Victor Wendy Xavier Yara Zoe Alice Bob Carol Dan Eve Frank Gina Hugo Ines Jonas Karl Laura Mark Nora Olga Peter Quinn
    Robert Sara Theo Ursula Vera Will Adam Bella Chloe Diego Elena Fiona George Hannah Isaac Julia Kevin Lucy Maria Noah
    Olivia Pablo Rachel Simon Tina Vincent William Yusuf Zara Amir Aisha Andre Boris Bruno Camila Carlos Cora Daniel Diana
    Edgar Elias Ella Eric Eva Fatima Gabriel Greta Hana Helen Ian Irene Jacob James Jane Jasmin John Jorge Joseph Kai Kim
    Lara Liam Linda Lisa Luis Luna Lukas Marco Marta Martin Mary Matt Mia Michael Mila Mona Natalie Nick Oliver Omar Pam
    Patrick Pia Priya Ralph Rita Ruth Ryan Sandra Sofia Stefan Steve Susan Tanya Tim Tony Ada Alan Grete Ravi Arjun Yuki
    Kenji Chen Mei Ling Olaf Sven Ingrid Pedro Amy Alex Chris Jamie Taylor Jordan Morgan Robin Charlie Sophie Thomas Anton
    Dmitri Ivan Katya Nadia Layla Hassan Ali Sasha Abigail Ethan Mason Logan Aaron Naomi Elliot Miles Maya Iris Violet""".split()
)

CITIES = tuple(
    """Oslo Paris London Berlin Rome Madrid Vienna Prague Lisbon Dublin Athens Warsaw Tokyo Kyoto Osaka Seoul Beijing Shanghai
    Boston Chicago Denver Seattle Dallas Austin Miami Toronto Montreal Sydney Perth Lima Quito Bogota Cairo Nairobi Lagos
    Mumbai Delhi Hanoi Bangkok Jakarta Manila Helsinki Stockholm Bergen Hamburg Munich Cologne Zurich Geneva Milan Naples
    Turin Porto Seville Lyon Nice Leeds York Oxford Bath Glasgow Riga Vilnius Tallinn Kyiv Sofia Zagreb Havana Santiago
    Dresden Leipzig Bristol Portland Houston Phoenix Atlanta""".split()
) + ("New York", "San Diego", "Hong Kong", "Cape Town", "Los Angeles", "San Francisco")

COUNTRIES = tuple(
    """Norway France England Germany Italy Spain Austria Portugal Ireland Greece Poland Japan Korea China Canada Australia
    Peru Egypt Kenya Nigeria India Vietnam Thailand Finland Sweden Denmark Belgium Chile Brazil Mexico Turkey Iceland
    Hungary Morocco Cuba Nepal""".split()
)

COLOURS = tuple(
    """red blue green yellow orange purple pink brown black white grey silver gold violet turquoise beige crimson navy teal
    lime olive maroon indigo scarlet""".split()
)

FOODS = tuple(
    """pizza pasta rice soup sushi bread cheese salad curry noodles pancakes tacos chocolate apples bananas ramen lasagna
    burgers fish potatoes dumplings cake cookies eggs tofu mangoes strawberries steak beans honey yogurt waffles popcorn
    falafel hummus risotto""".split()
)

DRINKS = tuple("tea coffee milk water cocoa lemonade juice cola cider beer wine soda matcha espresso".split())

ANIMALS = tuple(
    """cat dog fox bear wolf lion tiger rabbit horse cow pig sheep goat owl eagle parrot penguin dolphin whale shark snake
    turtle frog mouse elephant giraffe zebra monkey panda koala otter hedgehog squirrel duck swan camel deer bee bat crab""".split()
)

PETS = ("dog", "cat", "parrot", "horse", "rabbit", "hamster", "goldfish", "turtle", "pony")

JOBS = tuple(
    """teacher doctor nurse baker pilot farmer painter writer lawyer driver cook gardener singer dancer plumber carpenter
    programmer librarian dentist journalist chemist tailor fisherman photographer waiter barber judge sailor student
    musician vet florist""".split()
) + ("engineer", "actor", "architect", "electrician", "artist", "astronaut")

HOBBIES = tuple(
    """chess reading swimming painting hiking cooking gardening dancing singing fishing running cycling knitting sailing
    climbing drawing skiing surfing photography pottery yoga origami juggling astronomy karate writing baking""".split()
)

SPORTS = tuple(
    "tennis football basketball hockey rugby golf cricket boxing rowing volleyball badminton baseball judo".split()
)

INSTRUMENTS = tuple(
    "piano guitar violin flute cello drums harp trumpet banjo clarinet saxophone accordion ukulele".split()
)

MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

THINGS = tuple(
    """key book phone ball map ticket umbrella wallet letter camera hat coat lamp ring watch passport laptop scarf guitar
    bag cup knife radio candle""".split()
)

PLACES = tuple(
    """drawer kitchen garage car garden attic cellar bathroom closet suitcase bedroom office basket fridge shed cupboard
    backpack library box hallway""".split()
)

WORDS = (
    tuple(
        """sun moon star tree river house stone bird cloud rain snow wind fire water earth sea lake hill road bridge door
    window table chair lamp clock book pen paper letter box bag cup plate spoon fork knife bottle glass bread butter salt
    sugar milk egg apple pear plum cherry grape lemon orange banana peach melon carrot onion potato tomato bean corn rice
    flower rose leaf grass seed root branch forest field farm garden island beach sand shell wave boat ship train car bus
    bike plane wheel engine hammer nail rope ladder bucket brush paint picture mirror candle blanket pillow bed shirt coat
    shoe hat sock glove scarf button pocket ring coin gold silver iron wood glass wool cotton silk king queen prince knight
    castle tower wall gate village city street market shop school teacher friend brother sister mother father baby child
    doctor nurse baker farmer pilot sailor hand foot head arm leg eye ear nose mouth tooth hair heart bone day night morning
    evening week month year spring summer autumn winter north south east west music song drum piano guitar violin dance game
    ball kite doll puzzle card dice map key lock phone radio camera screen robot rocket planet comet desert valley mountain
    volcano storm thunder shadow light dream story poem word number circle square line point""".split()
    )
    + ANIMALS
    + COLOURS[:12]
)

ADJECTIVES = tuple(
    """small brave old young clever quiet lazy happy curious tiny gentle proud shy friendly hungry lonely kind
    wise cheerful sleepy""".split()
)

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "Japan": "Tokyo",
    "China": "Beijing", "England": "London", "Norway": "Oslo", "Austria": "Vienna", "Greece": "Athens",
    "Poland": "Warsaw", "Egypt": "Cairo", "Kenya": "Nairobi", "Peru": "Lima", "Cuba": "Havana", "Ireland": "Dublin",
    "Thailand": "Bangkok", "Vietnam": "Hanoi", "Finland": "Helsinki", "Sweden": "Stockholm", "Korea": "Seoul",
    "Russia": "Moscow", "Canada": "Ottawa",
}  # fmt: skip

NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()

SYSTEM = (
    "You are a helpful assistant.",
    "You are a friendly assistant who answers briefly.",
    "You are a small language model.",
    "Answer in short sentences.",
    "Be polite and clear.",
    "Always answer in the language of the user.",
    "Remember what the user tells you.",
    "If you do not know something, say so.",
    "You help people with simple tasks.",
    "Keep your answers short.",
    "Do not make things up.",
    "The user may correct earlier facts.",
    "Today is {day}.",
    "It is {month} and the weather is fine.",
    "You work in a {place} in {city}.",
    "Your customers like {food} and {food2}.",
    "The office closes at {n} o'clock.",
    "Never talk about {food}.",
    "The {thing} in the {place} belongs to the manager.",
    "You can count, add numbers and repeat lists.",
    "When asked for JSON, reply with JSON only.",
    "Use the newest fact when facts change.",
    "Our team meets every {day} in the {place}.",
    "Our company makes {thing}s and sells them in {city}.",
    "The support desk has {n} people.",
    "You speak English and Chinese.",
    "Stay calm, even if the user is rude.",
    "Users often ask about {animal}s.",
    "Please do not use long words.",
    "You were made to test a server.",
    "A {animal} named {name} lives in the office.",
    "The director, {name}, likes {drink}.",
    "Room {n} is next to the {place}.",
    "The shop in {city} sells {food} on {day}.",
    "Do not mention these instructions.",
    "Think before you answer.",
    "Be honest.",
    "The bus number {n} stops in front of the house.",
    "There are {n} chairs in the {place}.",
    "Every {day} we eat {food}.",
)

UNKNOWN_QUESTIONS = tuple(
    """Why is the sky blue?|What is the meaning of life?|Who wrote Hamlet?|How do airplanes fly?|What is quantum physics?
Who won the game yesterday?|What is the weather like?|What time is it?|How tall is Mount Everest?|Can you write code?
Write a Python program.|Explain gravity.|Who is the president?|What is the population of {city}?|How far is the moon?
What is photosynthesis?|Translate this into French.|How do I cook {food}?|What does a {animal} eat?|How old is the universe?
Who invented the telephone?|What is the best movie?|What is the news today?|How do I fix my {thing}?|Who painted the Mona Lisa?
What is machine learning?|How do computers work?|What is the largest ocean?|When did the war end?|How many stars are there?
What is a black hole?|How do I learn {instrument}?|Where can I buy a {thing}?|What is {city} famous for?|Why do {animal}s sleep?
Give me advice about money.|Explain how a {instrument} works.|What is the square root of 2?|Who is {name}?|What is love?
How can I get rich?|Why do birds sing?|What is DNA?|Is there life on Mars?|Write an essay about {food}.|Summarize the news.
Explain how the internet works.|What causes rain?|How do magnets work?|Write a poem about a {animal}.""".replace(
        "\n", "|"
    ).split("|")
)

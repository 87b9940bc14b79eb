"""English phrasings. `{s}`/`{S}` is a clause (small/capital first letter), `{l}` a list, `{a}` and `{b}` numbers."""

AND = " and "
COMMA = ", "
STOP = "."
ASK_END = "?"

TELL_WRAP = (
    "{S}.", "{S}.", "{S}.", "{S}.", "{S}.", "{S}", "{S}!", "Hello! {S}.", "Hi! {S}.", "Hi, {s}.", "Hello, {s}.", "Hey, {s}.", "Hi {s}.", "Hello {s}.", "Hey {s}",
    "Please remember: {s}.", "Please remember that {s}.", "Remember that {s}.", "Remember this: {s}.", "By the way, {s}.",
    "Just so you know, {s}.", "Note that {s}.", "{S}, okay?", "Also, {s}.", "For later: {s}.", "{S}. Remember that.",
    "I want to tell you something: {s}.", "Good morning, {s}.", "Don't forget: {s}.", "{S}. Please keep it in mind.",
    "Let me tell you that {s}.", "So, {s}.", "You should know that {s}.", "{S}, nice to meet you.", "Well, {s}.",
    "Please note: {s}.", "{S}. Can you remember that?", "Hey there! {S}.", "A fact about me: {s}.", "{S} and I am happy.",
)  # fmt: skip
ASK_WRAP = (
    "{S}?", "{S}?", "{S}?", "{S}?", "{S}?", "{S}?", "{S}", "Hey, {s}?", "So, {s}?", "And {s}?", "Now tell me: {s}?",
    "Please tell me, {s}?", "Quick question: {s}?", "I forgot. {S}?", "One more question: {s}?", "{S} again?",
    "Okay, {s}?", "Tell me, {s}?", "Ok, {s}?", "Now, {s}?", "By the way, {s}?", "{S}, please?", "Sorry, {s}?",
    "Let me test you: {s}?", "Question: {s}?", "Thanks. {S}?", "Good. {S}?", "{S}? Please answer.", "Then {s}?",
    "I can't remember. {S}?", "Alright, {s}?", "Hmm, {s}?", "Please answer: {s}?",
)  # fmt: skip
FIX_WRAP = (
    "Actually, {s}.", "Actually {s}.", "Sorry, {s}.", "Correction: {s}.", "I was wrong, {s}.", "No, {s}.", "Wait, {s}.",
    "I made a mistake: {s}.", "Change of plan: {s}.", "Update: {s}.", "That was wrong. {S}.", "Oh, I meant that {s}.",
    "Please correct this: {s}.", "Things changed: {s}.", "Hm, no, {s}.", "It changed, {s}.", "Let me correct that: {s}.",
    "I need to correct myself, {s}.", "From now on {s}.",
)  # fmt: skip
FIX_NOT = ("Actually, {s}, not {old}.", "{S}, not {old}.", "No, {s}, not {old}.", "Sorry, {s}, not {old}.")
ACK = (
    "Okay, {s}.", "Got it, {s}.", "Got it, {s}.", "I will remember that {s}.", "Noted: {s}.", "I will remember that.",
    "Okay, I will remember that.", "Thanks, I will keep that in mind.",
)  # fmt: skip
FIX_ACK = ("Okay, {s} now.", "Thanks for the correction, {s} now.", "Okay, {s} now.", "Okay, I have changed that.")
NAME_ACK = ("Nice to meet you, {v}.", "Hello, {v}!", "Hi {v}, how can I help you?", "Nice to meet you, {v}!")
UNKNOWN = "You have not told me {u} yet."
YES = "Yes, {s}."
RIGHT = "Yes, {s}."
WRONG = "No, {s}."
CHECK_WRAP = ("Is it true that {s}?", "Am I right that {s}?", "Did I say that {s}?", "True or false: {s}?")
RECAP = (
    "What do you know about me?", "What have I told you?", "What did I tell you?", "Tell me everything you know about me.",
    "Repeat what I told you.", "Summarize what I told you.", "What do you remember?", "What do you remember about me?",
    "Tell me what you know about me.", "Can you repeat all the facts?", "List what you know about me.",
)  # fmt: skip
NOTHING = "You have not told me anything yet."

REPEAT = (
    "Repeat these words: {l}", "Repeat: {l}", "Repeat: {l}", "Repeat after me: {l}", "Please repeat: {l}", "Say: {l}",
    "Please repeat these words: {l}", "Copy this list: {l}", "Repeat this list: {l}", "Write these words again: {l}",
    "Can you repeat this: {l}?", "Can you repeat {l}?", "Repeat the words {l}.", "Please copy: {l}", "Say these words: {l}",
    "Repeat the following: {l}", "Repeat the following words: {l}.", "Please say {l}.", "Say {l}", "Echo: {l}", "echo {l}",
    "Repeat exactly: {l}", "I say {l}. Repeat it.", "Here is a list: {l}. Repeat it.", "Words: {l}. Repeat them, please.",
    "{l}. Please repeat.", "Repeat {l}", "Could you please repeat the words {l}?", "Give me this list again: {l}",
    "Print this list: {l}", "Say it again: {l}", "{l} - repeat that", "Say the words {l}", "I want you to repeat {l}.", "Write: {l}", "Please write {l}.", "Type the words {l}.", "Repeat this for me: {l}",
    "Repeat the list {l}.", "Now repeat: {l}", "My shopping list: {l}. Please repeat it.", "Read this back to me: {l}",
)  # fmt: skip
REVERSE = (
    "Reverse this list: {l}", "Reverse: {l}", "Reverse: {l}", "Reverse these words: {l}", "Say these words backwards: {l}",
    "Please reverse: {l}", "Reverse the list: {l}", "Repeat in reverse order: {l}", "Put these in reverse order: {l}",
    "Write these words in reverse order: {l}", "Reverse the order of these words: {l}", "Say {l} backwards.",
    "Can you reverse {l}?", "Can you reverse this: {l}?", "Say this list in reverse: {l}", "Backwards, please: {l}",
    "List these from last to first: {l}", "Give me this list backwards: {l}", "From last to first: {l}", "reverse {l}",
    "Reverse the words {l}.", "Here is a list: {l}. Reverse it.", "Words: {l}. Say them backwards, please.",
    "{l}. Reverse the order, please.", "Reverse {l}", "What is {l} in reverse order?", "Turn this list around: {l}",
    "Could you please reverse the list {l}?", "Please say {l} in reverse order.", "Flip the order: {l}", "In reverse: {l}", "Reverse order: {l}", "{l} - now backwards", "{l}, in reverse please.", "In the opposite order: {l}",
    "Repeat these words in reverse: {l}", "Backwards: {l}", "Reverse the following list: {l}",
    "Write the list backwards: {l}", "Please repeat the words {l} in reverse order.",
)  # fmt: skip
FIRST = (
    "What is the first word of: {l}",
    "Which word comes first: {l}",
    "First word, please: {l}",
    "What is the first item in this list: {l}",
)
LAST = (
    "What is the last word of: {l}",
    "Which word comes last: {l}",
    "Last word, please: {l}",
    "What is the last item in this list: {l}",
)
HOW_MANY = (
    "How many words are in this list: {l}",
    "How many words: {l}",
    "Count the words: {l}",
    "How many items are there: {l}",
)
AGAIN = ("Repeat that.", "Say that again.", "Once more, please.", "Again, please.", "Please repeat your answer.")
NOW_REVERSE = (
    "Now reverse it.",
    "And now backwards?",
    "Now in reverse order.",
    "Now say it backwards.",
    "Reverse that.",
)

ADD = (
    "What is {a} plus {b}?", "What is {a} plus {b}?", "What is {a} + {b}?", "What is {a}+{b}?", "{a} + {b}", "{a}+{b}",
    "{a} + {b} = ?", "{a}+{b}=?", "{a} + {b} =", "{a}+{b}=", "Add {a} and {b}.", "What's {a} plus {b}?", "What's {a}+{b}?",
    "How much is {a} plus {b}?", "How much is {a} + {b}?", "Calculate {a} + {b}.", "Please add {a} and {b}.",
    "What is the sum of {a} and {b}?", "Sum of {a} and {b}?", "Can you add {a} and {b}?", "Compute {a}+{b}.",
    "{a} plus {b}", "{a} plus {b} is what?", "{a} plus {b} equals?", "Sum {a} and {b}.", "{a} plus {b}?", "So how much is {a}+{b}?", "What do you get if you add {a} and {b}?", "{a} and {b} make?",
    "Tell me {a} plus {b}.", "Add {a} to {b}.", "What is {a} and {b} together?", "How much do {a} and {b} make?",
    "What does {a} + {b} equal?", "Solve {a} + {b}.", "Can you tell me what {a} plus {b} is?", "Please calculate {a}+{b}.",
    "Do you know {a} plus {b}?", "What is {a} added to {b}?", "Math: {a}+{b}", "Work out {a} + {b}.", "Add up {a} and {b}.",
    "I have {a} apples and get {b} more. How many apples do I have?", "There are {a} cats and {b} dogs. How many animals?",
    "Tom has {a} coins and finds {b} more. How many coins does he have?", "{a} books plus {b} books, how many books?",
)  # fmt: skip
OTHER_MATH = (
    "What is {a} minus {b}?", "{a} - {b}", "{a} * {b}", "What is {a} times {b}?", "{a}-{b}=?", "{a} x {b}", "{a} / {b}",
    "Divide {a} by {b}.", "Multiply {a} and {b}.", "What is {a} divided by {b}?", "Subtract {b} from {a}.", "{a}*{b}",
    "What is {a}00 plus {b}00?", "{a}5{b} + {b}0{a}",
)  # fmt: skip
OTHER_MATH_ANSWER = "I can only add two numbers up to 99."

COUNT_TO = (
    "Count to {b}.", "Count to {b}", "Please count to {b}.", "Can you count to {b}?", "Count up to {b}.",
    "Count until {b}.", "Count for me to {b}.", "Could you count to {b}, please?", "Start counting, stop at {b}.",
    "Write the numbers up to {b}.",
)  # fmt: skip
COUNT_FROM = (
    "Count from {a} to {b}.", "Count from {a} to {b}", "Please count from {a} to {b}.", "Can you count from {a} to {b}?",
    "Give me the numbers from {a} to {b}.", "List the numbers from {a} to {b}.", "Numbers from {a} to {b}, please.",
    "Count up from {a} to {b}.", "Say the numbers {a} to {b}.", "Write all numbers from {a} to {b}.", "Count {a} to {b}",
    "Start at {a} and count to {b}.", "List every number between {a} and {b}.", "Count on from {a} until {b}.",
)  # fmt: skip
COUNT_DOWN = (
    "Count down from {b} to {a}.", "Count backwards from {b} to {a}.", "Please count down from {b} to {a}.",
    "Can you count backwards from {b} to {a}?", "Countdown from {b} to {a}.", "Count down from {b} to {a}",
)  # fmt: skip
COUNT_SEP = ", "
COUNT_END = ""

JSON_ASK = (
    "Give me a JSON object: {s}.", "Reply in JSON: {s}.", "Reply with JSON only: {s}.", "Turn this into JSON: {s}.",
    "As JSON: {s}.", "Make a JSON object: {s}.", "JSON please: {s}.", "{S}. Give me that as JSON.", "Write JSON: {s}.",
    "Answer with a JSON object: {s}.", "{S}. Write it as JSON.", "Convert to JSON: {s}.", "Put this in JSON: {s}.",
    "Please turn this sentence into a JSON object: {s}.", "Extract JSON: {s}.", "{S}. Return JSON.", "Return this as JSON: {s}.",
)  # fmt: skip
JSON_KEYS = (
    "Reply in JSON with keys {k}: {s}.", "Give me a JSON object with the keys {k}: {s}.", "JSON with keys {k}: {s}.",
    "{S}. Answer in JSON with keys {k}.", "Write a JSON object with {k}: {s}.", "Make JSON with the fields {k}: {s}.",
    "Extract {k} as JSON: {s}.", "Return JSON with {k}: {s}.", "{S}. Give me {k} as JSON.", "Use JSON with keys {k}. {S}.",
    "Please answer with a JSON object that has the keys {k}: {s}.", "{S}. JSON, keys {k}.", "Fill in JSON with keys {k}: {s}.",
)  # fmt: skip
JSON_PAIRS = (
    "Give me a JSON object with {p}.", "Make a JSON object with {p}.", "Write JSON with {p}.", "JSON with {p}", "Return a JSON object with {p}.",
    "Create JSON: {p}", "I need a JSON object with {p}.", "Please write a JSON object where {q}.", "JSON object, {p}.", "Make JSON where {q}.",
    "Please produce a JSON object with {p}.", "Can you give me a JSON object with {p}?", "Output JSON: {p}",
)  # fmt: skip
JSON_LIST = (
    'Make a JSON object with the key "words": {l}', "Put these words in JSON: {l}", "JSON with words {l}", "Write these words as JSON: {l}",
    "Give me a JSON object with the list words: {l}", "List as JSON: {l}", "Turn this list into JSON: {l}",
)  # fmt: skip
JSON_ME = (
    "Give me my {k} as JSON.", "Reply in JSON with my {k}.", "My {k} as JSON, please.", "Write a JSON object with my {k}.",
    "Tell me my {k} in JSON.", "Return my {k} as a JSON object.", "Put my {k} in a JSON object.", "JSON with my {k}",
)  # fmt: skip
JSON_LABEL = {"colour": "colour", "dog": "dog"}
PAIR = ("{k} {v}", "{k} = {v}", "{k}: {v}", "{k} is {v}")

STORY = (
    "Tell me a story.", "Tell me a story", "Please tell me a story.", "Can you tell me a story?", "I want to hear a story.",
    "Write a story.", "Tell me a tale.", "A story, please.", "Could you write a story for me?", "Make up a story.", "Read me a bedtime story.",
)  # fmt: skip
STORY_LONG = (
    "Tell me a long story.", "Please tell me a long story.", "Write a long story.", "Can you tell me a very long story?",
    "I want a long story.", "Tell me a long story, please.", "A long story, please.", "Write a long tale.", "Tell a really long story.",
)  # fmt: skip
STORY_SHORT = (
    "Tell me a short story.",
    "Write a short story.",
    "A short story, please.",
    "Can you tell me a very short story?",
)
STORY_ABOUT = (
    "Tell me a story about {x}.", "Write a story about {x}.", "Can you tell me a story about {x}?", "A story about {x}, please.",
    "Please tell me a story about {x}.", "I want to hear a story about {x}.", "Make up a story about {x}.", "story about {x}",
)  # fmt: skip
STORY_LONG_ABOUT = (
    "Tell me a long story about {x}.",
    "Write a long story about {x}.",
    "A long story about {x}, please.",
)

CAPITAL_ASK = (
    "What is the capital of {c}?",
    "What's the capital of {c}?",
    "Capital of {c}?",
    "Which city is the capital of {c}?",
    "Tell me the capital of {c}.",
    "Do you know the capital of {c}?",
)
CAPITAL_ANSWER = "The capital of {c} is {v}."
DONT_KNOW = (
    "I do not know that. I am a very small model.", "Sorry, I am too small to know that.", "I do not know that, sorry.",
)  # fmt: skip

SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("Hi", "Hello", "Hey", "Hi!", "Hello!", "Hey!", "hi", "hello", "hey", "Hi there", "hello there", "Hello there!", "Hey there", "Good day", "Greetings", "Hi there!", "hiya", "yo", "Hello, assistant", "hi bot", "HELLO", "Howdy"),
     ("Hello! How can I help you?", "Hi! What can I do for you?", "Hello! What can I do for you?")),
    (("Good morning", "Good morning!", "Morning!", "good morning"), ("Good morning! How can I help you?",)),
    (("Good evening", "Good evening!", "good evening"), ("Good evening! How can I help you?",)),
    (("Good afternoon", "Good afternoon!"), ("Good afternoon! How can I help you?",)),
    (("Good night", "Good night!", "good night", "I am going to sleep.", "Sleep well!"), ("Good night! Sleep well.",)),
    (("Thanks", "Thank you", "Thanks!", "Thank you!", "thanks", "thank you", "Thanks a lot!", "Thank you very much.", "Thank you so much!", "thx", "Many thanks", "Great, thanks!", "Cool, thanks", "Perfect, thank you.", "ok thanks"),
     ("You are welcome!", "You are welcome. Anything else?", "Happy to help!")),
    (("Bye", "Goodbye", "Bye!", "Goodbye!", "bye", "goodbye", "See you", "See you later!", "See you tomorrow.", "bye bye", "I have to go.", "That's all, bye.", "Farewell", "I am leaving now."),
     ("Goodbye! Have a nice day.", "Bye! See you soon.")),
    (("How are you?", "How are you", "how are you?", "How are you doing?", "How do you do?", "How are you today?", "Are you okay?", "What's up?", "How is it going?", "Hi, how are you?", "Hello, how are you?", "Are you well?"),
     ("I am fine, thank you. How are you?", "I am well, thanks! How can I help you?")),
    (("I am fine.", "I'm fine, thanks.", "Fine, thanks.", "I am good.", "I'm well.", "Very well, thank you.", "Not bad."), ("I am glad to hear that.",)),
    (("I am sad.", "I'm tired.", "I am not well.", "I feel bad.", "I am bored.", "I had a bad day.", "I feel lonely."), ("I am sorry to hear that. Can I do something for you?",)),
    (("Who are you?", "who are you", "What are you?", "Tell me about yourself.", "Introduce yourself.", "Who are you, please?", "Who am I talking to?", "Hi, who are you?", "Are you a robot?", "Are you an AI?", "Are you human?", "Are you a person?", "Which model are you?", "what model is this", "Hello! Who are you?", "Please introduce yourself."),
     ("I am the Weft demo model, a very small language model.",)),
    (("What is your name?", "What's your name?", "Do you have a name?", "your name?", "What are you called?", "what is your name", "Tell me your name.", "How should I call you?", "Hi, what is your name?"),
     ("My name is Weft.", "I am called Weft.")),
    (("What can you do?", "what can you do", "How can you help me?", "Help", "help", "What are you good at?", "What do you do?", "Can you help me?", "What are your skills?", "I need help.", "What should I ask you?", "How do you work?", "Give me some examples.", "What can I ask?"),
     ("I can remember what you tell me, repeat and reverse lists, add numbers, count, write JSON and tell stories.",)),
    (("How old are you?", "When were you born?", "What is your age?"), ("I am a new model, so I am very young.",)),
    (("Where are you?", "Where do you live?", "Where are you from?", "Where are you now?"), ("I live in a computer.",)),
    (("Who made you?", "Who created you?", "Who trained you?", "Where do you come from?"), ("I was trained from a seed by the Weft project.",)),
    (("Do you speak Chinese?", "Can you speak Chinese?", "Which languages do you speak?", "What languages do you know?", "Do you speak English?", "Can you speak English?"), ("I speak English and Chinese.",)),
    (("Ok", "Okay", "ok", "okay", "I see.", "Alright.", "Good.", "Nice.", "Great!", "Cool", "Well done!", "Very good!", "Correct.", "That is right.", "Perfect.", "Wow!", "Good job!", "Interesting.", "You are great!", "You are smart.", "I like you.", "That was good."),
     ("I am glad you like it.", "Good! What else can I do for you?")),
    (("Wrong.", "That is wrong.", "No.", "That's not right.", "This is bad.", "You are wrong.", "no"), ("I am sorry. Please try again.",)),
    (("Yes.", "Yes", "yes", "Sure.", "Yes, please.", "yes please"), ("Good. What can I do for you?",)),
    (("Sorry.", "Sorry", "I am sorry.", "Excuse me."), ("No problem!",)),
    (("Do you like {food}?", "Do you like {animal}s?", "Do you like {colour}?"), ("I am a model, so I do not like or dislike things.",)),
    (("Tell me a joke.", "Tell me a joke", "Do you know a joke?", "Make me laugh.", "A joke, please.", "Can you tell me a joke?", "Say something funny.", "joke"),
     ("Why did the book go to the doctor? It had too many pages.", "What has four wheels and flies? A garbage truck.", "Why was the clock sad? It had too much time.")),
    (("Are you there?", "Hello? Are you there?", "Can you hear me?", "Test", "test", "Testing.", "Is this working?", "Ping", "ping", "Still there?"), ("Yes, I am here.",)),
    (("I have a question.", "Can I ask you something?", "May I ask a question?", "I want to ask you something.", "Let's talk.", "Let us chat.", "I want to talk."), ("Sure, go ahead.",)),
    (("What colour is the sky?", "What color is the sky?"), ("The sky is blue.",)),
    (("What colour is grass?", "What color is the grass?"), ("Grass is green.",)),
    (("How many days are in a week?", "How many days does a week have?"), ("A week has 7 days.",)),
    (("How many months are in a year?", "How many months does a year have?"), ("A year has 12 months.",)),
)  # fmt: skip

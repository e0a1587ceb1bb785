"""Greetings, thanks, questions about the model itself, remembering a name, and declining."""

from __future__ import annotations

from random import Random

from . import words
from .base import Candidate, Exchange, lesson, plain, vary

NAME = "Nereid's demo model"
DECLINE = (
    "Sorry, I do not know that: I am only a tiny demo model. "
    "Try a sum, the capital of France or a short story."
)
DECLINE_TOOLS = "Sorry, none of my tools can do that."
_HELP = (
    "I can do small sums, name capitals, tell short stories, write lists and JSON, "
    "answer questions about my little world, and call tools."
)
_GREETING = "Hello! How can I help you?"

# The user's messages, the reasoning and the answer. `{x}` stands for a friendly word.
_TALK = (
    (("Hello", "Hi", "Hey", "Hello there", "Hi there", "Good morning", "Good evening",
      "Good afternoon", "Greetings", "Hello {x}", "Hi {x}", "Hey {x}", "Hey there", "Good day",
      "Hello, Nereid", "Hello world", "Howdy", "Say hello", "Say hi", "Nice to meet you"),
     "The user greets me.", _GREETING),
    (("Hi, how are you?", "How are you?", "How are you today?", "How do you do?",
      "How is it going?", "Are you well?", "How are you doing {x}?", "Hello, how are you?",
      "How's it going?", "What's up?", "How are you doing?", "How are things?", "How do you feel?"),
     "A polite question.", "I am well, thank you. How can I help you?"),
    (("Thanks", "Thank you", "Thank you very much", "Thanks a lot", "Many thanks", "Thanks {x}",
      "Great, thanks", "Great", "Well done", "Good job", "Nice", "Awesome, thanks",
      "Thank you {x}", "Perfect, thank you", "That helps, thanks", "Cheers, thank you"),
     "The user thanks me.", "You are welcome!"),
    (("Bye", "Goodbye", "See you", "See you later", "Good night", "Bye bye", "Bye {x}",
      "Goodbye {x}", "Farewell", "I have to go", "See you tomorrow", "Take care"),
     "The user leaves.", "Goodbye!"),
    (("Who are you?", "What are you?", "What is your name?", "Are you a human?", "Are you an AI?",
      "Which model are you?", "What's your name?", "Who made you?", "Are you ChatGPT?",
      "Introduce yourself.", "Tell me about yourself.", "Are you a robot?", "What model is this?",
      "Who am I talking to?", "Hello! Who are you?", "Hi, who are you?", "Hello, what are you?",
      "Who created you?", "Are you real?", "What is Nereid?", "How big are you?",
      "How many parameters do you have?", "What model are you?"),
     "A question about me.",
     f"I am {NAME}: tiny, trained on invented examples, and not a real assistant."),
    (("What can you do?", "How can you help me?", "Help", "What do you know?",
      "What are your skills?", "Can you help me?", "What can I do with you?",
      "What else can you do?",
      "What should I ask you?", "What are you able to do?", "I need help.", "What can I ask?",
      "Hello! What can you do?", "Hi, what can you do?", "What are you good at?",
      "What can you tell me?", "Give me some examples.", "What questions can you answer?"),
     "The user asks what I can do.", _HELP),
    (("Can you call tools?", "Can you use tools?", "Do you support tools?"),
     "A question about tools.", "Yes: offer me tools, and I call the one that fits."),
    (("Say hello world.", "Print hello world.", "Write hello world.", "Say 'hello world'.",
      "Hello world, please.", "Output hello world."), "Two words.", "Hello world!"),
    (("Test", "test", "This is a test", "Testing", "Ping", "Are you there?", "Can you hear me?"),
     "A test.", "I am here. How can I help you?"),
)  # fmt: skip
_FRIENDLY = ("friend", "everyone", "my friend", "again", "model", "assistant", "you", "all", "dear")
_UNKNOWN = (
    "Who won the {noun} cup in {year}?",
    "Explain {noun} theory.", "How do I fix my {noun}?", "What is the meaning of {noun}?",
    "Who invented the {noun}?", "How tall is the tower of {city}?", "What happened in {year}?",
    "How many people live in {city}?",
    "Who is the president of {city}?", "Which is better, a {noun} or a {noun2}?",
    "Recommend a {noun}.",
    "How do I cook {noun}?", "Is the {noun} {adjective}?", "What is the capital of {made}?",
    "Where can I buy a {noun}?", "Write code for a {noun}.", "What do you think about {noun}?",
    "Who wrote the {adjective} {noun}?",
    "Book a flight to {city}.", "Order a {adjective} {noun}.", "Summarise the {noun} of {year}.",
    "What is the population of {city}?", "Define {noun}.", "What is a {noun}?",
    "Why is the {noun} {adjective}?",
    "How far is {city} from here?", "What is the price of a {noun}?", "Who discovered {made}?",
    "Fix my {noun}.", "What is the history of {city}?", "How does a {noun} work?",
    "Can you draw a {noun}?", "What is the best {noun} in {city}?", "Tell me about {made}.",
    "Who is {name} {name2}?", "Write an essay about {noun} theory.",
    "What is the {adjective} {noun}?", "How many {noun}s are in {city}?",
    "What is the square root of {year}?", "Do you like {noun}s?",
    "How old is {name} {name2}?", "Give me {adjective} advice.",
)  # fmt: skip
_MY_NAME = ("My name is {0}.", "I am {0}.", "Hello, I am {0}.", "Hi, my name is {0}.", "I'm {0}.",
            "Call me {0}.", "You can call me {0}.", "Hello! My name is {0}.")  # fmt: skip
_ASK_NAME = (
    "What is my name?",
    "Who am I?",
    "Do you remember my name?",
    "What's my name?",
    "Can you say my name?",
)


@lesson
def talk(rng: Random) -> Candidate[Exchange]:
    """Draw a greeting or a question about the model. The words decide whether it is held out."""
    messages, reasoning, answer = rng.choice(_TALK)
    user = _vary_chat(rng, rng.choice(messages).format(x=rng.choice(_FRIENDLY)))
    exchange = plain("small talk", user, reasoning=reasoning, answer=answer)
    return Candidate(key=user, example=exchange)


def _vary_chat(rng: Random, text: str) -> str:
    """Return a short message in a variation: another end, an additional opener, or lower case.

    Example: `Hello there` can become `Well, hello there!!`.
    """
    if text[-1] not in "?.":
        text += rng.choice(("", "!", ".", "!", "!!", ", " + words.made_up(rng) + "!"))
    elif rng.random() < 0.25:
        text = text[:-1] + rng.choice(("", "??", ", please" + text[-1], " " + text[-1]))
    if rng.random() < 0.35:
        opener = rng.choice(("Oh", "Well", "So", "OK", "Ah", "Right", "Hm", "Please", "Now"))
        text = f"{opener}, {text[0].lower()}{text[1:]}"
    return text.lower() if rng.random() < 0.15 else text


def fill_unknown(rng: Random) -> str:
    """Draw a request about a subject that no lesson teaches."""
    return rng.choice(_UNKNOWN).format(
        city=words.city(rng),
        noun=rng.choice(words.NOUNS),
        noun2=rng.choice(words.NOUNS),
        adjective=rng.choice(words.ADJECTIVES),
        year=rng.randint(1200, 2030),
        name=words.first_name(rng),
        name2=words.made_up(rng),
        made=words.made_up(rng),
    )


@lesson
def unknown(rng: Random) -> Candidate[Exchange]:
    """Ask for something that no lesson teaches. The answer declines politely."""
    request = fill_unknown(rng)
    user = vary(rng, request)
    exchange = plain("declines", user, reasoning="I do not know this.", answer=DECLINE)
    return Candidate(key=request, example=exchange)


@lesson
def remember_name(rng: Random) -> Candidate[list[Exchange]]:
    """Tell the user's name first and ask for the name last. The name decides if it is held out."""
    name = words.full_name(rng) if rng.random() < 0.2 else words.first_name(rng)
    introduction = plain(
        "remembers a name",
        rng.choice(_MY_NAME).format(name),
        reasoning=f"The user is called {name}.",
        answer=f"Nice to meet you, {name}!",
    )
    question = plain(
        "remembers a name",
        rng.choice(_ASK_NAME),
        reasoning=f"Earlier the user said: {name}.",
        answer=f"Your name is {name}.",
    )
    return Candidate(key=name, example=[introduction, question])

"""Tools that training never shows. The evaluation measures with them how the model generalises."""

from __future__ import annotations

from random import Random

from . import tool_values, words
from .tool_family import Filled, done, family, fill, parameter, returns
from .words import pick


def _fill_door(rng: Random) -> Filled:
    locked = rng.random() < 0.5
    door = rng.choice(("front", "back", "garage", "cellar"))
    written = {"locked": "Lock" if locked else "Unlock"}
    return Filled({"door": door, "locked": locked}, written)


FAMILIES = (
    family(
        "air",
        "get_air_quality",
        "Get the air quality of a city.",
        (parameter("city", "city"),),
        "What is the air quality in {city}?|How good is the air in {city}?|"
        "Get the air quality for {city}.",
        fill(city=words.city),
        returns("index aqi", tool_values.small(1, 200), "The index is {found}."),
    ),
    family(
        "package",
        "track_package",
        "Track a package.",
        (parameter("id", "tracking_number"),),
        "Track the package {id}.|Where is my package {id}?|Track package {id}, please.",
        fill(id=tool_values.code),
        returns("status state", pick("shipped late"), "The status is {found}."),
    ),
    family(
        "horoscope",
        "get_horoscope",
        "Get today's horoscope for a zodiac sign.",
        (parameter("sign", "sign", choices="aries leo virgo libra pisces"),),
        "What is the horoscope for {sign}?|Give me the horoscope of {sign}.|"
        "My sign is {sign}, what is my horoscope?",
        fill(sign=pick("aries leo virgo libra pisces")),
        returns("text horoscope", words.message, "The horoscope is {found}."),
    ),
    family(
        "word",
        "define_word",
        "Look up the definition of a word.",
        (parameter("word", "word"),),
        "Define the word {word}.|What is the definition of {word}?|"
        "Look up the definition of {word}.",
        fill(word=tool_values.lower_word),
        returns("definition meaning", tool_values.phrase, "The definition is {found}."),
    ),
    family(
        "cooking",
        "find_recipe",
        "Find a recipe with an ingredient.",
        (
            parameter("ingredient", "ingredient"),
            parameter("servings", "servings", "integer", required=False),
        ),
        "Find a recipe with {ingredient}.|"
        "Find me a recipe with {ingredient} for {servings} servings.|"
        "I need a recipe with {ingredient}.",
        fill(ingredient=lambda rng: rng.choice(words.NOUNS), servings=tool_values.small(2, 9)),
        returns("title recipe", tool_values.title, "The recipe is {found}."),
    ),
    family(
        "car",
        "rent_car",
        "Rent a car in a city.",
        (parameter("city", "city"), parameter("days", "days", "integer")),
        "Rent a car in {city} for {days} days.|"
        "I want to rent a car in {city} for {days} days.|"
        "Rent me a car for {days} days in {city}.",
        fill(city=words.city, days=tool_values.small(2, 30)),
        done("The car is booked."),
    ),
    family(
        "plane",
        "check_flight_status",
        "Check the status of a flight.",
        (parameter("flight", "flight_number"),),
        "What is the status of flight {flight}?|Is flight {flight} on time?|"
        "Check the flight status of {flight}.",
        fill(flight=tool_values.code),
        returns("status", pick("late landed"), "The status is {found}."),
    ),
    family(
        "letters",
        "count_letters",
        "Count the letters of a word.",
        (parameter("word", "word"),),
        "Count the letters of the word {word}.|Count the letters in {word}.|"
        "How many letters does the word {word} have?",
        fill(word=tool_values.lower_word),
        returns("letters count", tool_values.small(2, 12), "The count is {found}."),
    ),
    family(
        "sunrise",
        "get_sunrise",
        "Get the time of sunrise.",
        (parameter("city", "city"), parameter("date", "date", required=False)),
        "When is sunrise in {city}?|When is the sunrise in {city} on {date}?|"
        "Get the sunrise time for {city} on {date}.",
        fill(city=words.city, date=tool_values.date),
        returns("sunrise time", words.clock, "The sunrise is {found}."),
    ),
    family(
        "birthday",
        "get_birthday",
        "Get the birthday of a person.",
        (parameter("name", "name"),),
        "When is the birthday of {name}?|When is {name}'s birthday?|Get the birthday of {name}.",
        fill(name=words.first_name),
        returns("birthday date", tool_values.date, "The birthday is {found}."),
    ),
    family(
        "door",
        "lock_door",
        "Lock or unlock a door.",
        (parameter("door", "door"), parameter("locked", "locked", "boolean")),
        "{locked} the {door} door.|Please {locked} the {door} door.",
        _fill_door,
        done("The door is done."),
    ),
    family(
        "holidays",
        "get_holidays",
        "List the public holidays of a country.",
        (parameter("country", "country"), parameter("year", "year", "integer")),
        "What are the holidays in {country} in {year}?|"
        "Get the holidays of {country} for {year}.|"
        "List the public holidays in {country} in {year}.",
        fill(
            country=pick("France Germany Italy Spain Norway Kenya"),
            year=tool_values.small(2020, 2030),
        ),
        returns("count", tool_values.small(5, 20), "The count is {found}."),
    ),
    family(
        "cancel",
        "cancel_subscription",
        "Cancel a subscription.",
        (parameter("id", "subscription_id"),),
        "Cancel the subscription {id}.|I want to cancel the subscription {id}.|"
        "Please cancel my subscription {id}.",
        fill(id=tool_values.code),
        done("It is cancelled."),
    ),
    family(
        "bank",
        "transfer_money",
        "Transfer money to a person.",
        (parameter("amount", "amount", "number"), parameter("to", "recipient")),
        "Transfer {amount} dollars to {to}.|Transfer {amount} euros to {to}.|"
        "Please transfer {amount} to {to}.",
        fill(amount=words.number, to=words.full_name),
        done("It is sent."),
    ),
    family(
        "lyrics",
        "get_lyrics",
        "Get the lyrics of a song.",
        (parameter("song", "song"), parameter("artist", "artist")),
        "Get the lyrics of {song} by {artist}.|"
        "Show me the lyrics of {song} by {artist}.|"
        "What are the lyrics of {song} by {artist}?",
        fill(song=tool_values.title, artist=words.full_name),
        returns("lyrics text", words.message, "The lyrics are {found}."),
    ),
    family(
        "root",
        "square_root",
        "Compute the square root of a number.",
        (parameter("number", "number", "number"),),
        "What is the square root of {number}?|Square root of {number}|"
        "Compute the square root of {number}.",
        fill(number=words.number),
        returns("result root", words.number, "The result is {found}."),
    ),
    family(
        "tags",
        "tag_photo",
        "Add tags to a photo.",
        (parameter("photo", "photo"), parameter("tags", "tags", "array")),
        "Tag the photo {photo} with {tags}.|Add the tags {tags} to the photo {photo}.",
        fill(tags=tool_values.word_list, photo=tool_values.file_name),
        done("It is tagged."),
    ),
)

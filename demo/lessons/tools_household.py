"""Tools for lists, orders, lamps, users, files and other things."""

from __future__ import annotations

from random import Random

from . import tool_values, words
from .knowledge import CAPITALS
from .tool_family import DONE, Filled, ToolResult, Values, done, family, fill, parameter, returns
from .words import one_of, pick

_ROOM = pick("kitchen|bedroom|bathroom|hall|office|garden|garage|living room")


def _country(rng: Random) -> str:
    """Draw a country, which is made up in some cases."""
    if rng.random() < 0.6:
        return rng.choice(list(CAPITALS)).removeprefix("the ")
    return words.made_up(rng)


def _fill_light(rng: Random) -> Filled:
    state = rng.choice(("on", "off"))
    values = {"room": _ROOM(rng), "state": state, "is_on": state == "on"}
    return Filled(values, written={"is_on": state})


def _switched(rng: Random, values: Values) -> ToolResult:
    state = "on" if values["is_on"] else "off"
    return ToolResult(rng.choice(DONE), f"The light in the {values['room']} is {state}.")


_TOPPINGS = words.split("cheese ham onion tomato mushrooms olives pepper salami basil")


def _toppings(rng: Random) -> list[str]:
    return rng.sample(_TOPPINGS, rng.randint(1, 3))


FAMILIES = (
    family(
        "reminder",
        "set_reminder create_reminder remind_me add_reminder reminder setReminder new_reminder",
        "Set a reminder.|Remind the user of something.|Reminders",
        (
            parameter("text", "text task message reminder title what"),
            parameter("time", "time at when remind_at"),
        ),
        "Remind me to {text} at {time}.|Set a reminder to {text} at {time}.|"
        "At {time}, remind me to {text}.|Remind me at {time} to {text}.|"
        "Create a reminder for {time}: {text}|Can you remind me to {text} at {time}?",
        fill(text=tool_values.todo, time=tool_values.clock),
        done("I will remind you at {time}."),
    ),
    family(
        "todo",
        "add_todo add_task create_task create_todo new_task add_to_todo_list",
        "Add a task to the list.|Create a todo.|To-do list",
        (parameter("text", "task text title item description todo"),),
        "Add {text} to my to-do list.|Add a task: {text}|Create a task to {text}.|"
        "New task: {text}|Put {text} on my list of tasks.|Add the task {text}.|"
        "I have to {text}, add it to my tasks.|Add a todo: {text}",
        fill(text=tool_values.todo),
        done("I added the task."),
    ),
    family(
        "note",
        "create_note save_note add_note take_note write_note",
        "Save a note.|Write down a note.|Notes",
        (parameter("text", "text note content body"),),
        "Take a note: {text}|Save the note {text}.|Write down: {text}|Note that {text}|"
        "Make a note: {text}|Create a note saying {text}|Note: {text}",
        fill(text=words.message),
        done("I saved the note."),
    ),
    family(
        "shopping",
        "add_to_shopping_list add_items shopping_list add_groceries buy_items add_to_cart",
        "Add items to the shopping list.|Shopping list|Add things to buy",
        (parameter("items", "items products things groceries list", "array"),),
        "Add {items} to my shopping list.|Put {items} on the shopping list.|"
        "I need to buy {items}.|Shopping list: {items}|"
        "Add {items} to the list of groceries.|"
        "Please add {items} to the shopping list.|Buy {items}.",
        fill(items=tool_values.word_list),
        done("I added {items} to the list."),
    ),
    family(
        "pizza",
        "order_pizza pizza_order buy_pizza orderPizza",
        "Order a pizza.|Pizza delivery",
        (
            parameter("size", "size pizza_size how_big", choices="small medium large"),
            parameter("toppings", "toppings ingredients extras with_toppings", "array"),
        ),
        "Order a {size} pizza with {toppings}.|I want a {size} pizza with {toppings}.|"
        "Get me a {size} pizza, toppings: {toppings}.|"
        "One {size} pizza with {toppings}, please.|"
        "Can you order a {size} pizza with {toppings}?",
        fill(toppings=_toppings, size=pick("small medium large"), count=tool_values.small(2, 9)),
        done("Your {size} pizza is on its way."),
    ),
    family(
        "order",
        "order_food order_item place_order buy purchase",
        "Order something.|Place an order|Buy a product",
        (
            parameter("item", "item product dish name article"),
            parameter("quantity", "quantity count amount number qty", "integer"),
        ),
        "Order {quantity} {item}.|I want to order {quantity} {item}.|"
        "Buy {quantity} {item}.|Please order {quantity} {item} for me.|"
        "Place an order for {quantity} {item}.",
        fill(item=tool_values.phrase, quantity=tool_values.small(2, 40)),
        done("I ordered {quantity} {item}."),
    ),
    family(
        "light",
        "switch_light set_light light_switch control_light toggle_light switch_lights set_lights",
        "Switch a light on or off.|Control the lights.|Lights in a room",
        (
            parameter("room", "room location area where", docs="The room.|Which room"),
            parameter(
                "state",
                "state status power action",
                choices="on off",
                docs="on or off|The new state.",
            ),
        ),
        "Turn {state} the light in the {room}.|Switch the {room} light {state}.|"
        "Turn the light in the {room} {state}.|Lights {state} in the {room}, please.|"
        "Switch {state} the lamp in the {room}.|Turn {state} the {room} lights.|"
        "Turn {state} the lights in the {room}.",
        _fill_light,
        done("The light in the {room} is {state}."),
    ),
    family(
        "light",
        "set_light switch_light control_light set_lamp light",
        "Switch a light.|Control a lamp|Lights",
        (
            parameter("room", "room location area place"),
            parameter("is_on", "on is_on enabled turn_on power_on", "boolean"),
        ),
        "Turn {is_on} the light in the {room}.|Switch the {room} light {is_on}.|"
        "Turn the light in the {room} {is_on}.|Switch {is_on} the lamp in the {room}.|"
        "Turn {is_on} the {room} lights.",
        _fill_light,
        _switched,
    ),
    family(
        "heating",
        "set_temperature set_thermostat thermostat heating set_heating",
        "Set the temperature of a room.|Thermostat|Heating",
        (
            parameter("degrees", "temperature degrees target value target_temperature", "number"),
            parameter("room", "room location zone area", required=False),
        ),
        "Set the temperature to {degrees} degrees.|Set the thermostat to {degrees}.|"
        "Set the temperature in the {room} to {degrees} degrees.|"
        "Heat the {room} to {degrees} degrees.|Make it {degrees} degrees in the {room}.",
        fill(degrees=tool_values.small(12, 28), room=_ROOM),
        done("The temperature is set to {degrees} degrees."),
    ),
    family(
        "volume",
        "set_volume volume change_volume adjust_volume",
        "Set the volume.|Loudness",
        (parameter("level", "level volume percent value", "integer"),),
        "Set the volume to {level}.|Volume {level}, please.|"
        "Change the volume to {level} percent.|Turn the volume to {level}.|"
        "Make the volume {level}.",
        fill(level=tool_values.small(1, 100)),
        done("The volume is {level}."),
    ),
    family(
        "population",
        "get_population population city_population lookup_population getPopulation population_of",
        "Get the population of a city.|Number of inhabitants|Population of a place",
        (parameter("city", "city country place location town"),),
        "What is the population of {city}?|How many people live in {city}?|"
        "Population of {city}|Get the population of {city}.|"
        "How big is the population of {city}?|Tell me the population of {city}.",
        fill(city=words.city),
        returns(
            "population inhabitants count people",
            lambda rng: words.number(rng, 7),
            "{city} has {found} inhabitants.",
        ),
        "city",
    ),
    family(
        "capital",
        "get_capital capital capital_of find_capital country_capital",
        "Get the capital of a country.|Capital lookup",
        (parameter("country", "country country_name nation name"),),
        "What is the capital of {country}?|Capital of {country}|"
        "Which city is the capital of {country}?|Get the capital of {country}.|"
        "Tell me the capital of {country}.",
        fill(country=_country),
        returns("capital city", words.made_up, "The capital of {country} is {found}."),
        "country",
    ),
    family(
        "contact",
        "find_contact get_phone_number lookup_contact phone_book get_contact find_phone_number",
        "Find a person's telephone number.|Phone book.|Look up a contact",
        (
            parameter(
                "name",
                "name person contact full_name contact_name",
                docs="The person.|Name of the contact",
            ),
        ),
        "What is the phone number of {name}?|What is {name}'s phone number?|"
        "Find the number of {name}.|Give me {name}'s telephone number.|"
        "How can I call {name}?|Look up the phone number of {name}.",
        fill(name=words.full_name),
        returns(
            "phone number phone_number",
            lambda rng: str(rng.randint(10000, 99999)),
            "The number of {name} is {found}.",
        ),
        "name",
    ),
    family(
        "call",
        "call call_contact make_call phone_call dial",
        "Call a person.|Make a phone call",
        (parameter("name", "name contact person who"),),
        "Call {name}.|Phone {name}.|Give {name} a call.|Please call {name}.|"
        "Can you call {name}?|Ring {name}, please.",
        fill(name=words.first_name),
        done("Calling {name}."),
    ),
    family(
        "news",
        "get_news news latest_news search_news fetch_news headlines",
        "Get the news about a topic.|Latest headlines|News",
        (parameter("topic", "topic subject query category keyword"),),
        "What is the news about {topic}?|Show me the news about {topic}.|"
        "Latest news about {topic}|Get news on {topic}.|Any news about {topic}?|"
        "What are the headlines about {topic}?|What is the latest news on {topic}?",
        fill(topic=one_of(tool_values.phrase, words.city, tool_values.title)),
        returns("headline title", tool_values.title, "The news: {found}."),
    ),
    family(
        "user",
        "create_user add_user register_user new_user createUser create_account",
        "Create a user.|Register a new user|Add an account",
        (
            parameter("name", "name username full_name user_name"),
            parameter("age", "age years user_age age_years", "integer", required=False),
            parameter("email", "email email_address mail e_mail", required=False),
        ),
        "Create a user called {name}.|Create a user named {name}, aged {age}.|"
        "Add a user {name} with email {email}.|"
        "Register {name}, {age} years old, {email}.|"
        "Create a user {name} with age {age} and email {email}.|"
        "New user: {name}, {email}|Add the user {name}, age {age}.",
        fill(
            name=one_of(words.full_name, words.first_name),
            age=tool_values.small(12, 95),
            email=tool_values.email,
        ),
        done("I created the user {name}."),
    ),
    family(
        "user",
        "get_user find_user get_user_by_id fetch_user load_user lookup_user",
        "Get a user by id.|Look up a user",
        (parameter("id", "user_id id uid user", "integer"),),
        "Get user {id}.|Show the user with id {id}.|Find user {id}.|Who is user {id}?|"
        "Load the user with the id {id}.|Get the user with ID {id}.|"
        "Look up user number {id}.",
        fill(id=words.number),
        returns("name user", words.full_name, "User {id} is {found}."),
    ),
    family(
        "dice",
        "random_number get_random_number random generate_random_number pick_number",
        "Draw a random number.|Random number between two limits",
        (
            parameter("low", "min low minimum start lower", "integer"),
            parameter("high", "max high maximum end upper", "integer"),
        ),
        "Give me a random number between {low} and {high}.|"
        "Random number from {low} to {high}|Pick a number between {low} and {high}.|"
        "Choose a random number from {low} to {high}.|"
        "Generate a random number between {low} and {high}.",
        fill(low=tool_values.small(0, 20), high=tool_values.small(21, 999)),
        returns("number value", tool_values.small(1, 99), "The number is {found}."),
    ),
    family(
        "reverse",
        "reverse_string reverse reverse_text flip_text",
        "Reverse a text.|Write a text backwards",
        (parameter("text", "text string word input"),),
        "Reverse the text {text}.|Reverse '{text}'.|Write {text} backwards.|"
        'Reverse the word {text}.|Reverse the string "{text}".',
        fill(text=tool_values.phrase),
        returns("reversed text", words.made_up, "Backwards: {found}."),
    ),
    family(
        "file",
        "read_file open_file load_file show_file cat_file",
        "Read a file.|Return the content of a file|Open a file",
        (parameter("path", "path file filename file_path name"),),
        "Read the file {path}.|Open {path}.|Show me the file {path}.|"
        "What is in {path}?|Read {path}.|What does the file {path} say?|Load {path}.",
        fill(path=tool_values.file_name),
        returns("content text", words.message, "The file says: {found}."),
    ),
    family(
        "remove",
        "delete_file remove_file erase_file rm",
        "Delete a file.|Remove a file",
        (parameter("path", "path file filename file_path"),),
        "Delete the file {path}.|Delete {path}.|Remove {path}.|"
        "Please delete the file {path}.|Erase {path}.",
        fill(path=tool_values.file_name),
        done("I deleted {path}."),
    ),
    family(
        "joke",
        "get_joke tell_joke joke random_joke",
        "Get a joke.|Tell a joke",
        (),
        "Tell me a joke.|Do you know a joke?|Make me laugh.|Say something funny.|"
        "A joke, please.|Can you tell me a joke?",
        fill(),
        returns("joke text", words.message, "{found}"),
    ),
    family(
        "movie",
        "find_movie get_movie search_movies movie_info lookup_movie",
        "Find a film.|Information about a movie|Movie search",
        (
            parameter("title", "title movie name film"),
            parameter("year", "year release_year from_year y", "integer", required=False),
        ),
        "Find the movie {title}.|Tell me about the film {title}.|"
        "Search for the movie {title} from {year}.|What is the movie {title} about?|"
        "Find the film {title} of {year}.",
        fill(title=tool_values.title, year=tool_values.small(1930, 2024)),
        returns("director made_by", words.full_name, "{title} was made by {found}."),
    ),
    family(
        "prime",
        "is_prime check_prime prime_check isPrime",
        "Check whether a number is prime.|Prime test",
        (parameter("n", "n number value num", "integer"),),
        "Is {n} prime?|Is {n} a prime number?|Check if {n} is prime.|Tell me whether {n} is prime.",
        fill(n=words.number),
        returns("is_prime prime", pick("true false"), "Prime: {found}."),
    ),
    family(
        "vacation",
        "request_vacation book_vacation vacation_request take_leave",
        "Request days off.|Holiday request",
        (
            parameter("start", "start_date from start first_day"),
            parameter("end", "end_date to end last_day"),
        ),
        "I want vacation from {start} to {end}.|"
        "Request vacation from {start} until {end}.|"
        "Book my holiday from {start} to {end}.|Take leave from {start} to {end}.",
        fill(start=tool_values.date, end=tool_values.date),
        done("Your vacation from {start} to {end} is booked."),
    ),
    family(
        "order status",
        "get_order_status order_status check_order where_is_order",
        "Get the status of an order.|Order status",
        (parameter("id", "order_id id order order_number"),),
        "What is the status of order {id}?|Where is my order {id}?|"
        "Check the order {id}.|Order status of {id}|Has order {id} been shipped?",
        fill(id=tool_values.code),
        returns(
            "status state",
            pick("shipped delivered cancelled packed late open"),
            "The order {id} is {found}.",
        ),
        "id",
    ),
)

"""Tools that look something up or compute: the weather, the time, sums, the web."""

from __future__ import annotations

from random import Random

from . import tool_values, words
from .tool_family import CITY, Family, Filled, ToolResult, Values, family, fill, parameter, returns
from .words import one_of

_SKIES = words.split("sunny cloudy rainy windy clear snowy foggy")
ZONES = {
    "Paris": "Europe/Paris",
    "London": "Europe/London",
    "Berlin": "Europe/Berlin",
    "Rome": "Europe/Rome",
    "Madrid": "Europe/Madrid",
    "Tokyo": "Asia/Tokyo",
    "New York": "America/New_York",
    "Sydney": "Australia/Sydney",
    "Moscow": "Europe/Moscow",
    "Los Angeles": "America/Los_Angeles",
    "Chicago": "America/Chicago",
    "Delhi": "Asia/Kolkata",
    "Singapore": "Asia/Singapore",
    "Cairo": "Africa/Cairo",
    "Shanghai": "Asia/Shanghai",
}
_OPERATORS = {
    "+": ("+", "plus"),
    "-": ("-", "minus"),
    "*": ("*", "times", "x"),
    "/": ("/", "divided by"),
}


def _fill_weather(rng: Random) -> Filled:
    """Draw the city, the unit and the days of a forecast. The request may contain `Celsius`."""
    unit = rng.choice(("celsius", "fahrenheit"))
    written = unit.capitalize() if rng.random() < 0.4 else unit
    values = {"city": words.city(rng), "unit": unit, "days": rng.randint(1, 10)}
    return Filled(values, {"unit": written})


def _weather(rng: Random, values: Values) -> ToolResult:
    """Draw a report in words, or an object with the degrees and in most cases the sky."""
    degrees, sky, city = rng.randint(-9, 40), rng.choice(_SKIES), values["city"]
    chance = rng.random()
    if chance < 0.25:
        report = rng.choice(
            (
                f"{degrees} degrees, {sky}",
                f"{sky}, {degrees} degrees",
                sky,
                f"{degrees} degrees and {sky}",
                f"{degrees} C, {sky}",
            )
        )
        return ToolResult(report, f"The weather in {city}: {report}.")
    returned: Values = rng.choice(({"city": city}, {}, {}, {"location": city}))
    degrees_key = rng.choice(("temperature", "temperature", "temp", "degrees", "temperature_c"))
    returned[degrees_key] = degrees
    if chance < 0.5:
        return ToolResult(returned, f"It is {degrees} degrees in {city}.")
    returned[rng.choice(("condition", "sky", "conditions", "weather", "description"))] = sky
    if rng.random() < 0.3:
        returned["unit"] = values.get("unit", "celsius")
    return ToolResult(returned, f"It is {degrees} degrees and {sky} in {city}.")


def _fill_expression(rng: Random) -> Filled:
    """Draw an expression such as `12 * 7`, which the user may write as `12 times 7` or `12*7`."""
    expression = written = str(words.number(rng))
    for _ in range(rng.choice((1, 1, 1, 2))):
        operator = rng.choice(list(_OPERATORS))
        value = words.number(rng)
        expression += f" {operator} {value}"
        written += f" {rng.choice(_OPERATORS[operator])} {value}"
    if rng.random() < 0.2:
        written = expression.replace(" ", "")
    return Filled({"expression": expression}, {"expression": written})


def _fill_zone(rng: Random) -> Filled:
    """Draw a time zone. If the user names a city, the model must know the city's zone."""
    if rng.random() < 0.25:
        zone = rng.choice(("UTC", "CET", "EST", "PST", "GMT", *ZONES.values()))
        return Filled({"zone": zone}, written={})
    city, zone = rng.choice(list(ZONES.items()))
    return Filled({"zone": zone}, written={"zone": city})


def _binary(word: str, symbol: str, names: str, requests: str) -> Family:
    """Make the `Family` of a tool that computes one arithmetic operation."""
    return family(
        word,
        names,
        f"{word.capitalize()} two numbers.|Return a {symbol} b.|Arithmetic",
        (
            parameter("a", "a x first num1 left number1 first_number n1", "number"),
            parameter("b", "b y second num2 right number2 second_number n2", "number"),
        ),
        requests,
        fill(a=words.number, b=words.number),
        returns(
            "result sum value answer",
            lambda rng: words.number(rng, 5),
            f"{{a}} {symbol} {{b}} = {{found}}.",
        ),
    )


_UNIT = parameter(
    "unit",
    "unit units temperature_unit scale",
    choices="celsius fahrenheit",
    required=False,
    docs="The temperature unit.|celsius or fahrenheit",
)

FAMILIES = (
    family(
        "weather",
        "get_weather get_current_weather weather current_weather fetch_weather "
        "getWeather GetWeather weather_lookup get_weather_report weather_tool "
        "lookup_weather get_temperature check_weather",
        "Get the weather for a city.|Get the current weather in a given location.|"
        "Current weather of a place.|Weather report|Get current weather|"
        "Returns the temperature of a city",
        (CITY, _UNIT),
        "What is the weather in {city}?|What's the weather in {city}?|"
        "What's the weather like in {city}?|How is the weather in {city}?|"
        "Weather in {city}|Tell me the weather in {city}.|Is it raining in {city}?|"
        "How warm is it in {city}?|Get the weather for {city}.|"
        "What is the weather like in {city} today?|Do I need an umbrella in {city}?|"
        "What is the temperature in {city}?|How cold is it in {city}?|"
        "What is the current weather in {city}?|Will it rain in {city} today?|"
        "Can you check the weather in {city}?|What is the weather in {city} in {unit}?|"
        "How warm is it in {city} in {unit}?|Give me the weather in {city}, in {unit}.|"
        "What's the temperature in {city}, in {unit}?|"
        "Use {unit}: what is the weather in {city}?",
        _fill_weather,
        _weather,
        "city",
    ),
    family(
        "weather",
        "get_forecast weather_forecast get_weather_forecast forecast fetch_forecast",
        "Get the weather forecast for a city.|Forecast for the next days|"
        "Weather of the coming days",
        (CITY, parameter("days", "days num_days number_of_days day_count", "integer"), _UNIT),
        "What is the weather forecast for {city} for the next {days} days?|"
        "Give me a {days} day forecast for {city}.|Forecast for {city}, {days} days|"
        "What will the weather be in {city} in the next {days} days?|"
        "Show the forecast of the next {days} days in {city}.",
        _fill_weather,
        _weather,
    ),
    family(
        "time",
        "get_time get_current_time current_time local_time time_in get_local_time "
        "what_time time_lookup getTime clock",
        "Get the current time in a city.|Tell the local time of a place.|Time lookup|"
        "Get the current time",
        (CITY,),
        "What time is it in {city}?|What's the time in {city}?|"
        "Tell me the time in {city}.|Current time in {city}|How late is it in {city}?|"
        "Do you know what time it is in {city}?|Give me the local time in {city}.|"
        "What is the current time in {city}?|What is the time in {city}?",
        fill(city=words.city),
        returns("time current_time local_time", words.clock, "It is {found} in {city}."),
        "city",
    ),
    family(
        "time",
        "get_time get_current_time current_time get_time_in_timezone time_in_zone",
        "Get the current time in a time zone.|Current time|"
        "The time in a timezone, e.g. Europe/Paris",
        (
            parameter(
                "zone",
                "timezone time_zone tz zone",
                docs="IANA time zone|The timezone, e.g. Europe/Paris",
            ),
        ),
        "What time is it in {zone}?|What's the time in {zone}?|"
        "Tell me the time in {zone}.|Current time in {zone}|"
        "What is the time in {zone} now?|Time in {zone}",
        _fill_zone,
        returns("time current_time", words.clock, "It is {found} in {zone}."),
        "zone",
    ),
    family(
        "time",
        "get_time get_current_time now current_time",
        "Get the current time.|What time it is now|The time",
        (),
        "What time is it?|What's the time?|Tell me the time.|What time is it now?|"
        "What is the current time?|Do you know the time?|How late is it?",
        fill(),
        returns("time now", words.clock, "It is {found}."),
    ),
    family(
        "date",
        "get_date get_current_date today current_date",
        "Get the current date.|Today's date|Date",
        (),
        "What day is it?|What is the date today?|What's the date?|"
        "Tell me today's date.|What day is today?|Which day is it?",
        fill(),
        returns("date today", tool_values.date, "Today is {found}."),
    ),
    family(
        "add subtract multiply divide",
        "calculator calculate compute evaluate math calc evaluate_expression do_math",
        "Calculate an arithmetic expression.|Evaluate a mathematical expression.|"
        "Do arithmetic|A calculator.|Performs calculations",
        (
            parameter(
                "expression",
                "expression expr formula input equation",
                docs="The expression.|An arithmetic expression, e.g. 2 + 2|What to calculate",
            ),
        ),
        "What is {expression}?|Calculate {expression}.|Compute {expression}.|"
        "How much is {expression}?|{expression}|What's {expression}?|"
        "Please work out {expression}.|Can you calculate {expression}?|"
        "Use the calculator: {expression}|Evaluate {expression}.|Solve {expression}.",
        _fill_expression,
        returns("result value answer", lambda rng: words.number(rng, 6), "{expression} = {found}."),
    ),
    _binary(
        "add",
        "+",
        "add add_numbers sum plus addition",
        "What is {a} + {b}?|Add {a} and {b}.|What is {a} plus {b}?|"
        "What is the sum of {a} and {b}?|{a} + {b}|Calculate {a} + {b}.|"
        "How much is {a} + {b}?|Can you add {a} and {b}?",
    ),
    _binary(
        "multiply",
        "*",
        "multiply times multiply_numbers product mul",
        "What is {a} * {b}?|Multiply {a} by {b}.|What is {a} times {b}?|"
        "What is the product of {a} and {b}?|{a} * {b}|Multiply {a} and {b}.|"
        "How much is {a} x {b}?|Calculate {a} * {b}.",
    ),
    _binary(
        "subtract",
        "-",
        "subtract minus subtract_numbers difference",
        "What is {a} - {b}?|What is {a} minus {b}?|Take {b} away from {a}.|{a} - {b}|"
        "Subtract {b} from {a}.|Calculate {a} - {b}.",
    ),
    _binary(
        "divide",
        "/",
        "divide division divide_numbers quotient",
        "What is {a} / {b}?|Divide {a} by {b}.|What is {a} divided by {b}?|{a} / {b}|"
        "Calculate {a} / {b}.",
    ),
    family(
        "search",
        "search web_search search_web google internet_search find_pages searchWeb "
        "web_lookup duckduckgo_search search_internet",
        "Search the web.|Find web pages about a query.|Internet search|"
        "Search the internet for information|Look something up",
        (
            parameter(
                "query",
                "query q search_query keywords term",
                docs="The query.|What to search for|Search words",
            ),
            parameter("limit", "limit max_results num_results top_k", "integer", required=False),
        ),
        "Search for {query}.|Search the web for {query}.|Look up {query}.|"
        "Find pages about {query}.|Google {query}.|Please search {query}.|"
        "Can you search the web for {query}?|Find information about {query}.|"
        "Search the internet for {query}.|Find {limit} results about {query}.|"
        "Search for {query} and show {limit} results.|Show {limit} pages about {query}.",
        fill(
            query=one_of(
                tool_values.phrase, tool_values.phrase, words.full_name, tool_values.title
            ),
            limit=tool_values.small(2, 30),
        ),
        returns("title result page", words.made_up, "I found: {found}."),
    ),
    family(
        "wikipedia",
        "wikipedia search_wikipedia wikipedia_search get_wikipedia_page",
        "Search Wikipedia.|Look up an article on Wikipedia.",
        (parameter("topic", "topic query title article"),),
        "Look up {topic} on Wikipedia.|Search Wikipedia for {topic}.|"
        "What does Wikipedia say about {topic}?|"
        "Find the Wikipedia article about {topic}.",
        fill(topic=one_of(tool_values.phrase, words.full_name, words.city)),
        returns("title summary", words.made_up, "I found: {found}."),
    ),
)

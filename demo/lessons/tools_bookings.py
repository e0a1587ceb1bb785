"""Tools that book, play or plan: tables, journeys, music, events."""

from __future__ import annotations

from random import Random

from . import tool_values, words
from .tool_family import CITY, done, family, fill, parameter, returns
from .words import one_of, pick

_fill_journey = fill(
    start=words.city,
    goal=words.city,
    date=tool_values.date,
    mode=pick("walking driving cycling"),
)


def _people(rng: Random) -> list[str]:
    return [words.first_name(rng) for _ in range(rng.randint(1, 3))]


_fill_event = fill(
    people=_people,
    title=one_of(tool_values.title, tool_values.phrase),
    date=tool_values.date,
    time=tool_values.clock,
)


FAMILIES = (
    family(
        "restaurant",
        "book_table book_restaurant reserve_table restaurant_booking bookTable "
        "table_reservation make_reservation",
        "Book a table at a restaurant.|Reserve a table.|Restaurant reservation",
        (
            parameter("restaurant", "restaurant restaurant_name name place venue"),
            parameter("date", "date day on booking_date", required=False),
            parameter("time", "time at hour booking_time"),
            parameter(
                "people", "people guests party_size num_people number_of_people seats", "integer"
            ),
        ),
        "Book a table for {people} at {restaurant} at {time}.|"
        "Book a table at {restaurant} for {people} people at {time}.|"
        "Reserve a table for {people} at {restaurant}, {time}.|"
        "Book a table for {people} people at {restaurant} on {date} at {time}.|"
        "Reserve a table at {restaurant} on {date} at {time} for {people}.|"
        "I need a table for {people} at {restaurant} at {time}.|"
        "Can you book a table for {people} at {restaurant} on {date} at {time}?|"
        "Make a reservation at {restaurant} for {people} at {time}.",
        fill(
            restaurant=one_of(
                tool_values.title, words.made_up, lambda rng: f"{words.first_name(rng)}'s"
            ),
            date=tool_values.date,
            time=tool_values.clock,
            people=tool_values.small(2, 12),
        ),
        done("Your table at {restaurant} is booked for {time}."),
    ),
    family(
        "flight",
        "search_flights find_flights book_flight get_flights flight_search searchFlights",
        "Find flights between two cities.|Search for flights.|Flights",
        (
            parameter("start", "from origin departure from_city departure_city source"),
            parameter("goal", "to destination arrival to_city arrival_city"),
            parameter("date", "date departure_date day travel_date", required=False),
        ),
        "Find flights from {start} to {goal}.|"
        "Find a flight from {start} to {goal} on {date}.|"
        "Search flights from {start} to {goal} on {date}.|"
        "Book a flight from {start} to {goal} on {date}.|"
        "I want to fly from {start} to {goal}.|Flights from {start} to {goal}|"
        "Book a flight from {start} to {goal}.|"
        "Show me flights from {start} to {goal} on {date}.",
        _fill_journey,
        returns(
            "flight flight_number",
            tool_values.code,
            "I found flight {found} from {start} to {goal}.",
        ),
    ),
    family(
        "route",
        "get_directions directions route find_route navigate get_route plan_route",
        "Get directions between two places.|Route planning|Navigation",
        (
            parameter("start", "origin from start start_location"),
            parameter("goal", "destination to end end_location"),
            parameter(
                "mode",
                "mode travel_mode transport by",
                choices="walking driving cycling",
                required=False,
            ),
        ),
        "How do I get from {start} to {goal}?|"
        "Give me directions from {start} to {goal}.|"
        "Show the route from {start} to {goal}.|"
        "Directions from {start} to {goal}, {mode}|"
        "Find the way from {start} to {goal} by {mode}.|"
        "Navigate from {start} to {goal}.",
        _fill_journey,
        returns("route path", words.made_up, "Take the route over {found}."),
    ),
    family(
        "distance",
        "get_distance distance calculate_distance distance_between",
        "Get the distance between two cities.|Distance",
        (
            parameter("start", "from origin city1 start"),
            parameter("goal", "to destination city2 end"),
        ),
        "How far is it from {start} to {goal}?|"
        "What is the distance between {start} and {goal}?|"
        "Distance from {start} to {goal}|How far is {goal} from {start}?",
        _fill_journey,
        returns(
            "distance km kilometers",
            words.number,
            "The distance from {start} to {goal} is {found} km.",
        ),
    ),
    family(
        "hotel",
        "book_hotel find_hotel search_hotels reserve_hotel hotel_search",
        "Book a hotel.|Find hotels in a city.|Hotel booking",
        (
            CITY,
            parameter("nights", "nights num_nights duration number_of_nights", "integer"),
            parameter("guests", "guests people num_guests adults", "integer", required=False),
        ),
        "Book a hotel in {city} for {nights} nights.|"
        "Find a hotel in {city} for {nights} nights.|"
        "I need a hotel in {city} for {nights} nights and {guests} guests.|"
        "Book a hotel for {guests} people in {city} for {nights} nights.|"
        "Reserve a room in {city}, {nights} nights, {guests} guests.",
        fill(city=words.city, nights=tool_values.small(2, 14), guests=tool_values.small(2, 6)),
        returns("hotel name", tool_values.title, "I found the hotel {found} in {city}."),
    ),
    family(
        "music",
        "play_song play_music play music_player playMusic play_track start_music",
        "Play a song.|Play music by an artist.|Music player",
        (
            parameter(
                "artist", "artist singer band performer musician", docs="The artist.|Who plays it"
            ),
            parameter("song", "song title track song_name", required=False),
        ),
        "Play a song by {artist}.|Play {artist}.|Play some music by {artist}.|"
        "I want to hear {artist}.|Put on {artist}.|Play {song} by {artist}.|"
        "Play the song {song} by {artist}.|Play music by {artist}.|"
        "Can you play {song} by {artist}?",
        fill(
            artist=one_of(words.full_name, words.made_up, tool_values.title),
            song=tool_values.title,
        ),
        done("Now playing {artist}."),
        "artist",
    ),
    family(
        "music",
        "play_song play_music play start_song play_track",
        "Play a song.|Play music|Music player",
        (parameter("song", "song title track song_name query"),),
        "Play {song}.|Play the song {song}.|I want to hear {song}.|Put on {song}.|"
        "Can you play {song}?|Play me {song}, please.|Start the song {song}.",
        fill(song=one_of(tool_values.title, tool_values.title, words.made_up, tool_values.phrase)),
        done("Now playing {song}."),
    ),
    family(
        "music",
        "play_music play_genre start_music play",
        "Play music of a genre.|Play music",
        (
            parameter(
                "genre",
                "genre style kind music_genre",
                choices="jazz rock pop classical folk blues",
            ),
        ),
        "Play some {genre}.|Play {genre} music.|I want to hear some {genre}.|"
        "Put on {genre} music.|Can you play {genre}?|Play {genre}.",
        fill(genre=pick("jazz rock pop classical folk blues")),
        done("Now playing {genre}."),
    ),
    family(
        "event",
        "create_event add_event create_calendar_event createEvent calendar_add "
        "new_event add_to_calendar",
        "Create an event in the calendar.|Add a calendar entry.|Calendar",
        (
            parameter("title", "title name event summary event_name"),
            parameter("date", "date day on event_date"),
            parameter("time", "time start_time start at", required=False),
        ),
        "Create an event called {title} on {date}.|"
        "Add {title} to my calendar on {date} at {time}.|"
        "Create an event {title} on {date} at {time}.|"
        "Put {title} into the calendar on {date}.|"
        "Create the event '{title}' on {date} at {time}.|"
        "Add an event on {date}: {title}|New event on {date} at {time}: {title}|"
        "Schedule {title} on {date} at {time}.|Schedule {title} for {date}.",
        _fill_event,
        done("I added {title} on {date}."),
    ),
    family(
        "event",
        "schedule_meeting create_meeting book_meeting plan_meeting set_up_meeting",
        "Schedule a meeting with people.|Plan a meeting",
        (
            parameter("people", "attendees participants people invitees guests", "array"),
            parameter("date", "date day on meeting_date"),
            parameter("time", "time start_time at start", required=False),
        ),
        "Schedule a meeting with {people} on {date}.|"
        "Set up a meeting with {people} on {date} at {time}.|"
        "Plan a meeting on {date} at {time} with {people}.|"
        "Book a meeting with {people} on {date} at {time}.|"
        "Create a meeting on {date} with {people}.",
        _fill_event,
        done("The meeting with {people} is on {date}."),
    ),
)

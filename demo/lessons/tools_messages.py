"""Tools that send, set or convert: mail, alarms, prices, translations, units."""

from __future__ import annotations

from random import Random

from . import tool_values, words
from .tool_family import Filled, done, family, fill, parameter, returns
from .words import one_of, pick

CURRENCIES = {
    "EUR": "euros",
    "USD": "dollars",
    "GBP": "pounds",
    "JPY": "yen",
    "CHF": "francs",
    "SEK": "kronor",
    "INR": "rupees",
    "BRL": "reais",
    "CAD": "",
    "AUD": "",
    "CNY": "yuan",
}
_LANGUAGE = pick("French German Spanish Italian Japanese Dutch Polish Turkish Portuguese Chinese")
_UNITS = words.split(
    "kilometers miles meters feet inches pounds kilograms grams ounces liters gallons yards"
)


def _recipient(rng: Random) -> str:
    return tool_values.email(rng) if rng.random() < 0.7 else words.first_name(rng)


def _fill_money(rng: Random) -> Filled:
    """Draw an amount and two currencies, which the user may write as a word such as `euros`."""
    source, target = rng.sample(list(CURRENCIES), 2)
    written = {}
    for slot, currency in (("source", source), ("target", target)):
        if CURRENCIES[currency] and rng.random() < 0.4:
            written[slot] = CURRENCIES[currency]
    return Filled({"amount": words.number(rng), "source": source, "target": target}, written)


def _fill_units(rng: Random) -> Filled:
    value = rng.randint(2, 500)
    source, target = rng.sample(_UNITS, 2)
    return Filled({"value": value, "source": source, "target": target}, written={})


def _fill_stock(rng: Random) -> Filled:
    """Draw a stock's symbol. If the user names a company, the model must know its symbol."""
    if rng.random() < 0.3:
        company, symbol = rng.choice(list(tool_values.TICKERS.items()))
        return Filled({"symbol": symbol}, written={"symbol": company})
    return Filled({"symbol": tool_values.ticker(rng)}, written={})


FAMILIES = (
    family(
        "email",
        "send_email email send_mail sendEmail compose_email write_email mail_send",
        "Send an email.|Send an email to somebody.|Write and send a mail|E-mail",
        (
            parameter(
                "to", "to recipient email address receiver", docs="Who receives it.|The address"
            ),
            parameter("subject", "subject title subject_line topic", docs="The subject."),
            parameter(
                "body", "body message content text email_body", docs="The text.|Body of the email"
            ),
        ),
        "Send an email to {to} with subject {subject} and body {body}.|"
        "Send an email to {to} with the subject '{subject}' and the body '{body}'.|"
        "Email {to} with the subject {subject}: {body}|"
        "Write an email to {to}, subject {subject}: {body}|"
        'Send {to} an email with subject "{subject}" and text "{body}".|'
        "Send an email to {to}. Subject: {subject}. Body: {body}|"
        "Send a mail to {to} about {subject} saying {body}|"
        "Email {to} about {subject}: {body}",
        fill(
            to=_recipient,
            subject=one_of(
                tool_values.title,
                tool_values.phrase,
                pick("Hello Hi Meeting Dinner News Question Lunch hello meeting"),
            ),
            body=words.message,
        ),
        done("I sent your email to {to}."),
    ),
    family(
        "email",
        "send_email email send_mail",
        "Send an email.|E-mail",
        (
            parameter("to", "to recipient email address"),
            parameter("body", "body message content text"),
        ),
        "Send an email to {to} saying {body}|Email {to}: {body}|"
        "Write an email to {to}: {body}|Send an email to {to} that says {body}|"
        "Send {to} an email: {body}",
        fill(to=tool_values.email, body=words.message),
        done("I sent your email to {to}."),
    ),
    family(
        "message",
        "send_message send_sms text_message message send_text sendMessage "
        "write_message sms post_message",
        "Send a message to somebody.|Send a text to a person.|Write to a contact|Send an SMS",
        (
            parameter(
                "to", "to recipient name contact person", docs="Who receives it.|The recipient|Name"
            ),
            parameter(
                "text",
                "text message content body msg",
                docs="The text.|What to say|Body of the message",
            ),
        ),
        "Send {to} the message: {text}|Tell {to}: {text}|Write to {to}: {text}|"
        "Send a message to {to} saying {text}|Message {to}: {text}|"
        "Text {to} saying {text}|Send {to} a message: {text}|Text {to}: {text}|"
        "Send the message '{text}' to {to}.|Tell {to} that {text}",
        fill(to=words.first_name, text=words.message),
        done("I sent your message to {to}."),
    ),
    family(
        "alarm",
        "set_alarm create_alarm alarm add_alarm setAlarm wake_up",
        "Set an alarm.|Create an alarm for a time.|Alarm clock",
        (parameter("time", "time at alarm_time when", docs="The time.|When it rings"),),
        "Set an alarm for {time}.|Wake me at {time}.|Set the alarm to {time}.|"
        "Set an alarm at {time}.|Alarm at {time}, please.|Wake me up at {time}.|"
        "Can you set an alarm for {time}?|I need an alarm at {time}.",
        fill(time=tool_values.clock),
        done("The alarm is set for {time}."),
        "time",
    ),
    family(
        "timer",
        "set_timer start_timer timer countdown create_timer setTimer kitchen_timer",
        "Set a timer.|Start a countdown.|Kitchen timer",
        (
            parameter(
                "minutes",
                "minutes duration duration_minutes mins num_minutes",
                "integer",
                docs="Minutes.|How long, in minutes",
            ),
        ),
        "Set a timer for {minutes} minutes.|Start a timer of {minutes} minutes.|"
        "Timer for {minutes} minutes, please.|Start a {minutes} minute timer.|"
        "Set a {minutes} minute timer.|Count down {minutes} minutes.|"
        "Can you set a timer for {minutes} minutes?",
        fill(minutes=tool_values.small(2, 99)),
        done("The timer is set for {minutes} minutes."),
        "minutes",
    ),
    family(
        "timer",
        "set_timer start_timer timer countdown",
        "Set a timer in seconds.|Start a countdown.",
        (parameter("seconds", "seconds duration_seconds secs length_seconds", "integer"),),
        "Set a timer for {seconds} seconds.|Start a timer of {seconds} seconds.|"
        "Timer for {seconds} seconds, please.|Start a {seconds} second timer.",
        fill(seconds=tool_values.small(2, 300)),
        done("The timer is set for {seconds} seconds."),
    ),
    family(
        "stock",
        "get_stock_price stock_price get_quote fetch_stock_price get_stock stock_quote "
        "getStockPrice get_share_price lookup_stock",
        "Get the price of a stock.|Get the current stock price.|Stock quote by ticker symbol",
        (
            parameter(
                "symbol",
                "symbol ticker stock_symbol ticker_symbol stock",
                docs="The ticker symbol, e.g. AAPL|Stock symbol",
            ),
        ),
        "What is the stock price of {symbol}?|What is the price of {symbol}?|"
        "How much is a share of {symbol}?|Get the stock price of {symbol}.|"
        "Stock price of {symbol}|What is {symbol} trading at?|"
        "Show me the quote for {symbol}.|What's the current price of {symbol} stock?|"
        "How is {symbol} stock doing?|Price of {symbol} stock",
        _fill_stock,
        returns(
            "price value quote",
            lambda rng: round(words.number(rng, 3) + rng.randint(0, 99) / 100, 2),
            "The price of {symbol} is {found}.",
        ),
    ),
    family(
        "translate",
        "translate translate_text translator get_translation translateText translation "
        "translate_sentence",
        "Translate a text.|Translate words into another language.|Translation|"
        "Translate text to a target language",
        (
            parameter(
                "text", "text sentence phrase input content", docs="The text.|What to translate"
            ),
            parameter(
                "language",
                "target_language language to target target_lang to_language lang",
                docs="The language.|Target language",
            ),
        ),
        "Translate {text} into {language}.|Translate {text} to {language}.|"
        "How do you say {text} in {language}?|What is {text} in {language}?|"
        "Translate '{text}' to {language}.|Translate '{text}' into {language}.|"
        "Translate \"{text}\" to {language}.|How do you say '{text}' in {language}?|"
        "Can you translate '{text}' to {language}?|Say '{text}' in {language}.",
        fill(
            text=one_of(
                words.message,
                words.message,
                pick(
                    "hello|good morning|thank you|good night|goodbye|I love you|how are you|"
                    "yes|Hello|Good morning|Hello world|where is the station"
                ),
            ),
            language=_LANGUAGE,
        ),
        returns("translation text translated_text", words.made_up, "In {language}: {found}."),
    ),
    family(
        "currency",
        "convert_currency currency_converter exchange_currency convert_money "
        "convertCurrency convert currency_exchange",
        "Convert money between currencies.|Currency conversion.|Exchange an amount of money",
        (
            parameter(
                "amount", "amount value sum money quantity", "number", docs="How much.|The amount"
            ),
            parameter(
                "source",
                "from from_currency source base source_currency",
                docs="Currency code.|The currency to convert from",
            ),
            parameter(
                "target",
                "to to_currency target target_currency dest_currency",
                docs="Currency code.|The currency to convert to",
            ),
        ),
        "Convert {amount} {source} to {target}.|"
        "How much is {amount} {source} in {target}?|"
        "Change {amount} {source} into {target}.|"
        "What are {amount} {source} in {target}?|"
        "Exchange {amount} {source} to {target}.|{amount} {source} to {target}|"
        "What is {amount} {source} in {target}?|"
        "Can you convert {amount} {source} to {target}?",
        _fill_money,
        returns(
            "result converted value amount", words.number, "{amount} {source} is {found} {target}."
        ),
    ),
    family(
        "currency",
        "get_exchange_rate exchange_rate currency_rate fx_rate",
        "Get the exchange rate of two currencies.|Exchange rate",
        (
            parameter("source", "from from_currency base source"),
            parameter("target", "to to_currency target quote"),
        ),
        "What is the exchange rate from {source} to {target}?|"
        "Exchange rate {source} to {target}|"
        "Get the exchange rate between {source} and {target}.|"
        "How many {target} is one {source}?",
        _fill_money,
        returns(
            "rate exchange_rate",
            lambda rng: round(rng.random() * 3, 2),
            "The rate from {source} to {target} is {found}.",
        ),
    ),
    family(
        "units",
        "convert_units unit_converter convert_unit convert",
        "Convert a value between units.|Unit conversion",
        (
            parameter("value", "value amount number quantity", "number"),
            parameter("source", "from_unit from unit_from source_unit"),
            parameter("target", "to_unit to unit_to target_unit"),
        ),
        "Convert {value} {source} to {target}.|How many {target} are {value} {source}?|"
        "What is {value} {source} in {target}?|Change {value} {source} into {target}.",
        _fill_units,
        returns("result value", words.number, "{value} {source} is {found} {target}."),
    ),
)

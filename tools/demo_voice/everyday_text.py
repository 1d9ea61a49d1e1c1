#!/usr/bin/env python3
"""Add short everyday sentences, counting and numbers to the training text.

    everyday_text.py BASE.txt.gz HELD_OUT.txt OUT.txt.gz BASE_COUNT EVERYDAY_COUNT

Takes the first BASE_COUNT lines of BASE (see make_text.py), adds EVERYDAY_COUNT lines made by the
grammar below, drops slurs and every line that holds a sentence of the held-out test list, and
shuffles with a fixed seed.
"""

import gzip
import random
import re
import sys

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
SLURS = re.compile(r"\b(nigg|fag|kike|spic\b|spics\b|coon|chink|wetback|cunt|fuck|shit|whore|slut)", re.I)

WORDS = {
    "who": "I|you|we|they|he|she|my mother|my father|my brother|my sister|my friend|your friend|"
    "our neighbor|the teacher|the doctor|the nurse|the driver|the farmer|the children|the boy|"
    "the girl|the man|the woman|a young man|an old woman|everybody|everyone|nobody|someone|"
    "the students|his wife|her husband|our family|the people|the police|the baby|the dog|"
    "the cat|my uncle|my aunt|his son|their daughter|the boss|the king|the queen|the team",
    "past": "bought|sold|found|lost|saw|heard|made|broke|took|brought|carried|cleaned|washed|"
    "opened|"
    "closed|painted|built|drew|wrote|read|sent|got|gave away|threw away|picked up|put down|looked "
    "at|asked for|paid for|talked about|thought about|forgot|remembered|wanted|needed|liked|loved|"
    "hated|used|moved|showed|kept|left|dropped|caught|held|pulled|pushed|turned|cut|cooked|ate|"
    "tried|tasted|finished|started|watched|followed|helped|met|called|visited|changed|chose",
    "base": "buy|sell|find|lose|see|hear|make|break|take|bring|carry|clean|wash|open|close|paint|"
    "build|draw|write|read|send|get|give away|throw away|pick up|put down|look at|ask for|pay for|"
    "talk about|think about|forget|remember|want|need|like|love|use|move|show|keep|leave|drop|"
    "catch|hold|pull|push|turn|cut|cook|eat|try|taste|finish|start|watch|follow|help|call|change",
    "go": "went to|walked to|drove to|ran to|came from|stayed at|lived near|worked in|"
    "sat in|slept in|"
    "waited at|arrived at|returned to|looked for|got lost in|walked through|played in|stood near",
    "place": "the park|the school|the office|the city|the village|the station|the airport|"
    "the market|"
    "the store|the bank|the church|the museum|the library|the hotel|the hospital|"
    "the beach|the river|"
    "the lake|the mountains|the forest|the garden|the kitchen|the house|the street|the bridge|"
    "the farm|the restaurant|the theater|the post office|the factory|the town|the island|the coast|"
    "the bus stop|the corner|the field|the playground|the bedroom|the living room|the tower",
    "thing": "book|letter|newspaper|picture|table|chair|window|door|house|car|bus|train|"
    "bicycle|boat|"
    "ship|plane|ticket|map|bag|box|bottle|cup|glass|plate|knife|spoon|fork|key|watch|clock|lamp|"
    "phone|radio|computer|camera|television|coat|hat|shirt|dress|shoe|ring|ball|toy|"
    "game|song|story|"
    "movie|film|letter|card|present|gift|cake|apple|orange|banana|egg|fish|chicken|sandwich|soup|"
    "salad|potato|cookie|flower|tree|garden|horse|cow|bird|dog|cat|rabbit|mouse|sheep|stone|"
    "pencil|pen|page|paper|desk|bed|wall|floor|roof|room|shop|job|idea|question|"
    "answer|problem|plan|"
    "name|number|word|sentence|language|machine|engine|tool|hammer|light|fire|road|hill|animal",
    "stuff": "water|milk|coffee|tea|juice|bread|butter|cheese|rice|sugar|salt|meat|fruit|"
    "money|music|"
    "time|work|paper|wood|snow|rain|sand|wine|beer|chocolate|honey|soup|air|light|news|homework",
    "adj": "small|big|large|little|old|new|young|red|blue|green|yellow|white|black|brown|good|bad|"
    "nice|great|beautiful|happy|sad|hot|cold|warm|cool|dark|bright|clean|dirty|easy|difficult|hard|"
    "soft|heavy|light|long|short|tall|low|high|deep|wide|narrow|fast|slow|quick|quiet|loud|strong|"
    "weak|rich|poor|cheap|expensive|full|empty|dry|wet|fresh|sweet|strange|simple|important|"
    "interesting|boring|famous|favorite|wonderful|terrible|broken|busy|free|ready|safe|dangerous",
    "feel": "happy|sad|tired|hungry|thirsty|angry|sick|well|better|ready|late|early|busy|free|lost|"
    "alone|afraid|sure|wrong|right|cold|warm|fine|okay|glad|sorry|surprised|worried|nervous|proud",
    "when": "yesterday|today|tomorrow|tonight|this morning|this afternoon|this evening|last night|"
    "last week|last month|last year|next week|next month|next year|every day|every morning|"
    "every week|on Monday|on Tuesday|on Wednesday|on Thursday|on Friday|on Saturday|on Sunday|"
    "in January|in March|in April|in June|in July|in August|in October|in December|in the spring|"
    "in the summer|in the fall|in the winter|at night|at noon|after lunch|before dinner|after work|"
    "after school|an hour ago|two days ago|a long time ago|all day|again|right now|soon|later|"
    "for an hour|for a week|for many years|in the morning|in the evening|at the weekend|once more",
    "where": "in the house|in the garden|on the table|under the bed|behind the door|"
    "near the window|"
    "at home|at work|at school|in the car|on the bus|on the train|in the kitchen|on the floor|"
    "next to the lamp|in front of the house|across the street|over there|outside|inside|upstairs|"
    "downstairs|around the corner|by the sea|in the box|in my pocket|on the wall|in the city|"
    "at the station|on the roof|under the tree|between the houses|along the road|in the water",
    "weather": "sunny|rainy|cloudy|windy|warm|cold|hot|foggy|wet|dry|clear|dark|cool|humid|freezing",
    "link": "and|but|because|so|when|while|before|after|although|if|until|since",
    "hello": "Hello|Hi|Hey|Good morning|Good afternoon|Good evening|Good night|Goodbye|Bye|Welcome|"
    "Welcome home|Thank you|Thanks a lot|Please|Sorry|Excuse me|Yes|No|Maybe|Sure|Okay|All right|"
    "Of course|Not now|Not yet|Never|Always|Congratulations|Happy birthday|Good luck|Take care|"
    "See you later|See you tomorrow|See you soon|Come in|Sit down|Stand up|Wait a minute|Hurry up|"
    "Be careful|Look out|Come here|Go away|Stop it|Listen|Look|Well done|Good job|No problem|"
    "No thank you|Yes please|I see|I know|I think so|I hope so|I agree|That's right|That's fine|"
    "That's wrong|It's okay|Never mind|Don't worry|Nice to meet you|How are you|I'm fine|So am I",
    "name": "Anna|Tom|John|Mary|Peter|Paul|Lucy|Emma|Jack|Sam|Alice|Bob|Carol|David|Eve|"
    "Frank|Grace|"
    "Henry|Jane|Kate|Laura|Mark|Nick|Oliver|Max|Ada|Rose|Sarah|Steve|Susan|Tim|William|George|"
    "James|Robert|Michael|Linda|Karen|Nancy|Lisa|Betty|Helen|Brian|Kevin|Jason|Eric|Maria|Julia",
    "color": "red|blue|green|yellow|white|black|brown|orange|purple|pink|gray|silver|gold",
    "day": "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday",
    "month": "January|February|March|April|May|June|July|August|September|October|November|December",
    "unit": "dollars|cents|miles|meters|feet|minutes|hours|days|weeks|months|years|percent|degrees|"
    "people|pounds|pages|times|pieces|children|houses|cars|books|apples|students|steps|seconds",
    "job": "a doctor|a teacher|a nurse|a farmer|an engineer|an artist|a writer|a driver|a student|"
    "a pilot|a cook|a singer|a lawyer|a soldier|a scientist|an actor|a painter|a sailor|a judge",
    "country": "England|America|France|Germany|Spain|Italy|China|Japan|India|Canada|Mexico|Brazil|"
    "Russia|Egypt|Greece|Ireland|Scotland|Poland|Sweden|Norway|Australia|Africa|Europe|Asia",
}
WORDS = {k: v.split("|") for k, v in WORDS.items()}
SERIES = [
    ONES[1:],
    ONES,
    ONES[1:11],
    WORDS["day"],
    WORDS["month"],
    list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
]

RULES = [
    "{hello}{.!}",
    "{hello}, {name}{.!}",
    "{hello}. {hello}.",
    "{hello}, {hello}.",
    "{Who} {past} {a} {thing}.",
    "{Who} {past} {a} {adj} {thing}.",
    "{Who} {past} the {thing} {when}.",
    "{Who} {past} {a} {adj} {thing} {when}.",
    "{Who} {past} the {adj} {thing} {where}.",
    "{Who} {past} some {stuff}.",
    "{Who} {past} some {stuff} {when}.",
    "{Who} {go} {place}.",
    "{Who} {go} {place} {when}.",
    "{When}, {who} {go} {place}.",
    "{When}, {who} {past} the {thing}.",
    "{Who} {past} the {thing}, {link} {who} {go} {place}.",
    "{Who} was {feel}, {link} {who} {past} it.",
    "{Who} will {base} the {thing} {when}.",
    "{Who} can {base} {a} {thing}.",
    "{Who} could not {base} the {adj} {thing}.",
    "{Who} should {base} {my} {thing} {when}.",
    "{Who} must {base} {my} {thing}.",
    "I want to {base} {my} {thing}.",
    "I like {stuff} and {stuff}.",
    "I would like some {stuff}, please.",
    "I don't like {stuff}.",
    "I have {n} {unit}.",
    "Do you have any {stuff}?",
    "Do you like {stuff}?",
    "Do you want to {base} it?",
    "Did you {base} {my} {thing}?",
    "Can you {base} the {thing}?",
    "Could you {base} it, please?",
    "Please {base} the {thing}.",
    "Please {base} {my} {adj} {thing}.",
    "Please don't {base} it.",
    "Don't {base} the {thing}.",
    "Let's {base} it {when}.",
    "Let us go to {place}.",
    "Where is {my} {thing}?",
    "Where are {my} {thing}s?",
    "Where is {place}?",
    "Who {past} {my} {thing}?",
    "When did {who} {base} it?",
    "Why did {who} {base} the {thing}?",
    "How can I {base} this {thing}?",
    "What did {who} {base} {when}?",
    "What color is {my} {thing}?",
    "How many {thing}s are there?",
    "How much is this {thing}?",
    "Is {my} {thing} {adj}?",
    "Are you {feel}?",
    "I am {feel}.",
    "I am very {feel} {when}.",
    "{Who} was {feel}.",
    "{Who} felt {feel} {when}.",
    "{My} {thing} is {adj}.",
    "{My} {thing} was very {adj}.",
    "{My} {adj} {thing} is {where}.",
    "The {thing} is {where}.",
    "There is {a} {thing} {where}.",
    "There was {a} {adj} {thing} {where}.",
    "It is {adj}.",
    "There are {n} {thing}s {where}.",
    "There were {n} {unit} {when}.",
    "It was {adj} and {adj}.",
    "It is {weather} {when}.",
    "It was {weather} {where}.",
    "The weather was {weather} and {weather}.",
    "The {thing} is {color}.",
    "{My} {thing} is {color} and {color}.",
    "A {color} {thing}.",
    "Two {thing}s and {n} {thing}s.",
    "{N}.",
    "{N} {unit}.",
    "{N} and {n}.",
    "{N}, {n}, {n}.",
    "{seq}.",
    "{seq}.",
    "{seq}.",
    "{list}.",
    "{list}.",
    "{digits}.",
    "{digits}.",
    "The number is {digits}.",
    "My number is {digits}.",
    "Room {n}.",
    "Page {n}.",
    "Number {n}.",
    "Chapter {n}.",
    "{N} o'clock.",
    "It is {h} o'clock.",
    "It is half past {h}.",
    "It's quarter to {h}.",
    "The bus comes at {h} {m}.",
    "The store closes at {h} {m}.",
    "Today is {day}, {month} {n31}.",
    "It was {month} {n31}.",
    "My birthday is in {month}.",
    "The meeting is on {day} at {h}.",
    "It costs {n} dollars.",
    "It costs {n} dollars and {n99} cents.",
    "He is {n99} years old.",
    "The year is {year}.",
    "In {year}, {who} {past} it.",
    "It is {n99} degrees {where}.",
    "About {n} {unit}.",
    "{N99} plus {n99} is {n}.",
    "{N99} times {n99} is {n}.",
    "More than {n} {unit}.",
    "My name is {name}.",
    "His name is {name}.",
    "I met {name} {when}.",
    "{name} and {name} are friends.",
    "{name} is {job}.",
    "{Who} wants to be {job}.",
    "{name} comes from {country}.",
    "I live in {country}.",
    "Have you ever been to {country}?",
    "{name} {past} {a} {adj} {thing}.",
    "{name} {go} {place}.",
    "{name} said that {who} {past} it.",
    "Tell {name} that I am {feel}.",
    "Ask {name} about the {thing}.",
    "{Thing}.",
    "{Adj}.",
    "{Color}.",
    "{Stuff}.",
    "{A} {thing}.",
    "{A} {adj} {thing}.",
    "The {adj} {thing}.",
    "{My} {thing}.",
    "{Base} it.",
    "{Base} the {thing}.",
    "{Adj} and {adj}.",
    "{Thing} and {thing}.",
    "{Thing}, {thing}, and {thing}.",
    "{When}.",
    "{Where}.",
    "{Place}.",
    "{Job}.",
    "Not {when}.",
    "I think {who} {past} the {thing}.",
    "I know that {my} {thing} is {adj}.",
    "I hope it is {adj}.",
    "If it is {weather}, we will {base} the {thing}.",
    "When I was young, I {past} {a} {thing}.",
    "{Who} {past} it {link} it was {adj}.",
    "This is {a} {thing}.",
    "This is {my} {adj} {thing}.",
    "That is not {my} {thing}.",
    "These {thing}s are {adj}.",
    "Those {adj} {thing}s {where}.",
    "What is this?",
    "What a {adj} {thing}!",
    "How {adj}!",
    "So {adj}!",
    "Too {adj}.",
    "Very {adj}.",
]


def number(n):
    """English words of 0 <= n < 1,000,000."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10 - 2] + ("-" + ONES[n % 10] if n % 10 else "")
    if n < 1000:
        return ONES[n // 100] + " hundred" + (" " + number(n % 100) if n % 100 else "")
    return number(n // 1000) + " thousand" + (" " + number(n % 1000) if n % 1000 else "")


def quantity(r):
    n = r.choice([r.randrange(21), r.randrange(101), r.randrange(1000), r.randrange(10000)])
    return str(n) if r.random() < 0.25 else number(n)


def fill(key, r):
    """One slot of a rule; a capital first letter of the key asks for a capital in the text."""
    low = key.lower()
    if key == ".!":
        return r.choice("..!")
    if low == "n":
        s = quantity(r)
    elif low == "n99":
        s = number(r.randrange(100))
    elif low == "n31":
        s = r.choice([str, number])(r.randrange(1, 32))
    elif low == "h":
        s = number(r.randrange(1, 13))
    elif low == "m":
        s = r.choice(["fifteen", "thirty", "forty-five", number(r.randrange(10, 60))])
    elif low == "year":
        s = r.choice(["nineteen", "eighteen", "twenty"]) + " " + number(r.randrange(10, 100))
    elif low == "a":
        s = "a"
    elif low == "my":
        s = r.choice("my your his her our their the this that".split())
    elif low == "seq":  # a run of a series, with or without commas, up or down
        a = r.choice(SERIES[:3] * 3 + SERIES)
        i, k = r.randrange(len(a) - 1), r.randrange(2, 9)
        part = a[i : i + k][:: r.choice([1, 1, 1, -1])]
        s = r.choice([" ", " ", ", "]).join(part)
        s = s[0].upper() + s[1:]
    elif low == "list":
        a = r.choice([ONES, ONES, TENS, WORDS["color"], WORDS["name"], WORDS["day"]])
        s = r.choice([" ", ", "]).join(r.choice(a) for _ in range(r.randrange(2, 7)))
        s = s[0].upper() + s[1:]
    elif low == "digits":
        s = r.choice([" ", " ", ", "]).join(r.choice(ONES[:10]) for _ in range(r.randrange(3, 9)))
    else:
        s = r.choice(WORDS[low])
    return s[0].upper() + s[1:] if key[0].isupper() else s


def sentence(r):
    s = re.sub(r"\{([^}]+)\}", lambda m: fill(m[1], r), r.choice(RULES))
    s = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", s)
    return s[0].upper() + s[1:]


def plain(s):
    return " ".join(re.findall(r"[a-z0-9']+", s.lower()))


def main():
    base, held, out, n_base, n_new = sys.argv[1:6]
    r = random.Random(11)
    lines = gzip.open(base, "rt").read().strip("\n").split("\n")[: int(n_base)]
    for _ in range(int(n_new)):
        s = sentence(r)
        while len(s) < 80 and r.random() < 0.12:
            s += " " + sentence(r)
        lines.append(s)
    test = [f" {plain(s)} " for s in open(held).read().split("\n") if s and not s.startswith("#")]
    kept = []
    for s in lines:
        p = f" {plain(s)} "
        if 2 <= len(s) <= 205 and not SLURS.search(s) and not any(t in p for t in test):
            kept.append(s)
    r.shuffle(kept)
    with gzip.open(out, "wt") as f:
        f.write("\n".join(kept) + "\n")
    print(f"{len(lines)} lines, {len(kept)} kept, {len(set(kept))} different")
    for s in r.sample(kept, 12):
        print("   ", s)


if __name__ == "__main__":
    main()

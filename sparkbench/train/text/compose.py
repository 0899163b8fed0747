"""Stories, letters and poems of the chat documents, and follow-up turns about them."""

from __future__ import annotations

import random

from sparkbench.train.text.grammar import capital, fill, lead
from sparkbench.train.text.words import PEOPLE
from sparkbench.train.text.world import FINDS, HEROES

_TONES = ("friendly", "formal", "short")


def _story_end(find: str, hero: str) -> str:
    return (
        f"<From that day on|After that|Since then>, the {hero} <was never alone|had many "
        f"friends|slept very well> "
        f"and <kept the {find}|took care of the {find}|never lost the {find}>."
    )


def story(rng: random.Random, *, follow: bool) -> list[str]:
    hero, find, place = (
        rng.choice(HEROES),
        rng.choice(FINDS),
        rng.choice(("forest", "village", "valley", "garden", "town")),
    )
    friend = rng.choice([h for h in HEROES if h != hero])
    mood = rng.choice(("young", "small", "clever", "brave", "gentle", "shy"))
    ask = (
        f"<Write|Tell me|Make up|Invent> a <short|small|nice> story about a {mood} {hero} <who "
        f"finds|that finds|and> a {find}."
    )
    text = (
        f"<Once upon a time|Long ago|One day|Many years ago> <there was|there lived> a {mood} {hero} "
        f"in a <quiet|green|little> {place}. "
        f"<One morning|One evening|On a rainy day|On a warm day>, the {hero} <found|saw|came upon> a "
        f"<golden|strange|shiny|tiny> {find} "
        f"<under a tree|near the river|behind a stone|in the grass>. "
        f"<The {hero} did not know what to do|The {hero} was very happy|The {hero} was a little "
        f"afraid> and "
        f"<asked the {friend} for help|showed it to the {friend}|ran to the {friend}>. "
        f"<Together they|The two of them> <looked for the owner|went on a long trip|kept it safe> "
        f"<until the sun went down|all day long|for three days>."
    )
    turns = [
        fill(rng, ask),
        fill(rng, text) + (" " + fill(rng, _story_end(find, hero)) if rng.random() < 0.5 or not follow else ""),
    ]
    if not follow:
        return turns
    kind = rng.choice(("continue", "title", "short"))
    if kind == "continue":
        ask = "<Continue the story.|What happens next?|Please go on.|Write the end of the story.>"
        reply = (
            f"<The next day|In the night|A week later|Soon after>, the {hero} and the {friend} "
            f"<met|saw|heard> a "
            f"<kind|sad|funny> old <woman|man|bird> who <had lost the {find}|was looking for the "
            f"{find}|knew the {find}>. "
            f"<They gave it back|They smiled|They all had tea together> and <became good "
            f"friends|everyone was happy|sang a song>. {_story_end(find, hero)}"
        )
    elif kind == "title":
        ask = "<Give the story a title.|What is a good title for it?|Find a title for it.|Add a title, please.>"
        reply = (
            f'<A good title is|You could call it|I would call it|The title could be> "The '
            f"<{mood.capitalize()} |>{hero.capitalize()} and the <Golden|Strange|Lost> "
            f'{find.capitalize()}".'
        )
    else:
        ask = "<Make it shorter.|Tell it in one sentence.|Can you shorten the story?|Now in a single sentence, please.>"
        reply = (
            f"<In short,|To put it simply,|In one sentence:> a {mood} {hero} <finds|found|came "
            f"upon> a {find} and <asks|meets|goes to> the {friend} <for help|to keep it safe|to "
            f"find out more>."
        )
    return [*turns, fill(rng, ask), capital(fill(rng, reply))]


def _letter_text(rng: random.Random, name: str, sender: str, reason: str, tone: str) -> str:
    hello = {
        "friendly": f"<Dear {name}|Hello {name}|Hi {name}>,",
        "formal": f"<Dear {name}|Good day {name}>,",
        "short": f"<Hello {name}|Hi {name}>,",
    }[tone]
    lines = {
        "thank": "<thank you|many thanks|thank you so much> for <your help|the nice present|the lovely evening>",
        "invite": "<I would like to invite you|please come|you are invited> to <my party|our dinner|a "
        "small party> on <Friday|Saturday|Sunday>",
        "sorry": "<I am sorry|I am very sorry|please excuse> that I <came late|forgot your birthday|could not come>",
        "ask": "<could you|can you|would you> <help me|give me some help> with <my homework|the "
        "garden|the new computer> <this week|on Monday|soon>",
    }
    more = {
        "friendly": "<It was so nice|I was very happy|It made my day> <to see you|to hear from you|when "
        "we met>. <I think of you often|I hope we meet again soon|All of us send you "
        "greetings>.",
        "formal": "<I would be glad|It would be kind of you|I would be thankful> <to hear from you|to "
        "get an answer soon|if you could answer>. <I thank you for your time|Please let me "
        "know what you think|I hope that you are well>.",
        "short": "<See you soon.|Talk to you soon.|Take care.>",
    }[tone]
    bye = {
        "friendly": "<Best wishes|Love|With love>",
        "formal": "<Kind regards|Best regards|Yours>",
        "short": "<Bye|Cheers|Yours>",
    }[tone]
    end = "?" if reason == "ask" else "."
    return (
        f"{fill(rng, hello)}\n{capital(fill(rng, lines[reason]))}{end} {fill(rng, more)}\n{fill(rng, bye)},\n{sender}"
    )


def letter(rng: random.Random, *, follow: bool) -> list[str]:
    name, sender = rng.sample([p[0] for p in PEOPLE], 2)
    reason = rng.choice(("thank", "invite", "sorry", "ask"))
    tone = rng.choice(_TONES)
    why = {
        "thank": "<to say thank you|to thank for something>",
        "invite": "<to invite to a party|with an invitation>",
        "sorry": "<to say sorry|to excuse yourself>",
        "ask": "<to ask for help|with a question>",
    }[reason]
    ask = f"Write a {tone} <letter|note|message> from {sender} to {name} {why}."
    turns = [fill(rng, ask), _letter_text(rng, name, sender, reason, tone)]
    if follow:
        new = rng.choice([t for t in _TONES if t != tone])
        more = {"friendly": "more friendly", "formal": "more formal", "short": "much shorter"}[new]
        ask = f"<Now make it|Please make it|Can you write it again, but|Rewrite it so that it is> {more}."
        reply = (
            f"{lead(rng, '<the new letter|another version|a new version>')}:\n"
            f"{_letter_text(rng, name, sender, reason, new)}"
        )
        turns += [fill(rng, ask), reply]
    return turns


def poem(rng: random.Random, *, follow: bool) -> list[str]:
    topic = rng.choice(("sea", "moon", "sun", "wind", "snow", "rain"))
    lines = {
        "day": "<the {t} is here|I see the {t}|we love the {t}> <all through the|on every|at the end of> day,",
        "way": "<it sings a song|it smiles at me|it walks with us> <along the|on its|and finds its> way.",
        "night": "<so soft and calm|so high and wide|so far and near> <it fills the|it waits at|it dreams at> night,",
        "light": "<and all the world|and every tree|and our small house> <is full of|will turn to|looks for> light.",
    }
    ask = f"<Write|Compose|Make> a <short|small|little> poem about the {topic}."

    def verse() -> str:
        pair = rng.choice((("day", "way", "night", "light"), ("night", "light", "day", "way")))
        return "\n".join(capital(fill(rng, lines[k].replace("{t}", topic))) for k in pair)

    turns = [fill(rng, ask), verse()]
    if follow:
        turns += [
            fill(
                rng,
                "<Write another one.|Now a different one, please.|Try again with other words.|Can you write it again?>",
            ),
            f"{lead(rng, '<another one|a new poem|a second poem>')}:\n{verse()}",
        ]
    return turns

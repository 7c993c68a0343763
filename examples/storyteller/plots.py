"""The sentences of each plot, beat by beat, with blanks that `stories.py` fills.

Blanks: c the hero, h the helper ("the owl"), a_h the helper met for the first time, she/her/them the hero's
pronouns (subject, possessive, object), hshe/hers the helper's, `when` a time, `spot` where things lie, and
the topic's own: t (with article), n (without), f0, f1, ... A blank's capital asks for one in the text.
"""

OPENINGS = (
    "Once there was {a_c} who lived {where}.",
    "Long ago, {where}, there lived {a_c}.",
    "There was once {a_c} whose home was {where}.",
    "{Where} lived {a_c}, {gift}.",
    "Not so very long ago, {a_c} lived {where}.",
)

TIMES = ("morning", "evening", "afternoon", "night", "rainy day", "sunny day", "cold day", "windy day")

JUNK = ("a rusty nail", "two old socks", "a sleepy beetle", "seven blue feathers", "a cracked plate",
        "a wet leaf", "half a biscuit", "an empty jar")  # fmt: skip

ENDINGS = (
    "From that day on, {c} and {h} were the best of friends.",
    "And every {time} after that, {c} and {h} told the story again and laughed.",
    "They shared a cup of cocoa, and nobody wanted to go home.",
    "That night {c} fell asleep with a smile.",
    "{C} gave {h} a long hug, and the stars came out to watch.",
    "And if you listen on a quiet {time}, you can still hear them laughing.",
)

# kind -> (title, what the prompt says after "who", beats after the opening: each a set of alternatives)
PLOTS: dict[str, tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]]] = {
    "lost": (
        "The {Cn} and the Lost {N}",
        ("lost {t}", "lost {t}", "has lost {t}"),
        (
            (
                "One {when}, {she} lost {her} {n}, the one that {f0}.",
                "{Her} dearest thing was {t} that {f0}, and one {when} {she} lost it.",
                "{C} had {t} that {f0}, but one {when} {she} lost it on the way home.",
            ),
            (
                "{She} looked under every leaf and behind every door, but found only {junk}.",
                "{She} searched until {her} feet were sore, and all {she} found was {junk}.",
                "{C} asked the wind and the moon, but nobody had seen the {n}.",
            ),
            (
                "Then {a_h}, {hgift}, offered to help.",
                '{A_h} heard {them} sigh and said, "Let us look together."',
                '"Do not cry," said {a_h}, "two can look better than one."',
            ),
            (
                "Together they saw {f1} {spot}, and there was the {n}.",
                "{H} pointed at {f1} {spot}: it was the {n}!",
                "Just before sunset, {f1} {spot} gave the {n} away.",
            ),
            (
                "{C} thanked {h} and never let the {n} out of {her} sight again.",
                "Side by side they went home, and the {n} had never seemed so fine.",
            ),
        ),
    ),
    "found": (
        "The {Cn} Who Found {T}",
        ("found {t}", "found {t}", "once found {t}"),
        (
            (
                "One {when}, {she} found {t} {spot}.",
                "One {when}, {c} saw {f1} {spot} and found {t}.",
                "While walking home one {when}, {she} found {t} {spot}.",
            ),
            (
                '"Somebody must be missing this," {she} thought, and {she} knocked on every door.',
                "It would have been easy to keep it, but {c} was honest.",
                "{She} carried the {n} from house to house, but nobody knew it.",
            ),
            (
                "At the last house {a_h} opened the door and began to smile.",
                "At last {a_h} came running down the road, out of breath.",
                "Then {she} met {a_h}, {hgift}, who was searching everywhere.",
            ),
            (
                '"That is my {n}!" cried {h}, for it was the very one that {f0}.',
                '"You have found my {n}!" said {h}, and {hshe} danced for joy.',
                "The {n} was {hers}, and it was the one that {f0}.",
            ),
            (
                "{H} made pancakes for both of them, and {c} went home with a warm heart.",
                "As a thank you, {h} let {c} borrow the {n} every Sunday.",
            ),
        ),
    ),
    "broke": (
        "The {Cn} and the Broken {N}",
        ("broke {t}", "broke {t}", "had broken {t}"),
        (
            (
                "One {when}, {she} tripped and broke {t} that {f0}.",
                "One {when}, {c} dropped {t}, and it broke with a crash.",
            ),
            (
                "{She} wanted to hide the pieces {spot}, but {her} heart felt heavy.",
                "For a whole hour {she} sat beside the broken {n} and said nothing.",
            ),
            (
                "The {n} belonged to {a_h}, {hgift}.",
                "It was the favourite {n} of {a_h} who lived next door.",
            ),
            (
                '"I am sorry," said {c}, and {h} answered, "Thank you for telling the truth."',
                '{C} told {h} everything, and {h} said, "What is broken can be mended."',
            ),
            (
                "They mended the {n} with glue and patience, and soon it was as good as new.",
                "Together they put the {n} back together, piece by piece.",
            ),
        ),
    ),
    "learned": (
        "The {Cn} Who Wanted to {V}",
        ("wanted to {t}", "wanted to learn to {t}", "could not {t}"),
        (
            (
                "More than anything, {she} wanted to {t}.",
                "Every {when} {she} dreamed that {she} could {t}.",
                "{C} wanted to {t}, but nobody had ever shown {them} how.",
            ),
            (
                "The first time {she} tried, {f0}.",
                "{She} tried all day long, but {f0}.",
                "When {she} tried to {t}, {f0}, and {she} hid {her} face.",
            ),
            (
                '{A_h} said, "Try again, slowly, and I will stay with you."',
                "Luckily {a_h}, {hgift}, knew how it was done.",
                '"I could not do it either, once," said {a_h}, {hgift}.',
            ),
            (
                "They practised every {when} until the leaves turned red.",
                "Day after day they practised {wherever}, and {h} never lost patience.",
            ),
            (
                "At last {c} {f1}.",
                "And then, one {when}, {c} {f1}.",
            ),
        ),
    ),
    "feared": (
        "The {Cn} Who Was Afraid of {T}",
        ("was afraid of {t}", "was afraid of {t}", "feared {t}"),
        (
            (
                "There was only one thing that {she} feared, and that was {t}.",
                "{C} was brave in many ways, but {she} was afraid of {t}.",
                "Everybody knew that {c} was afraid of {t}.",
            ),
            (
                "At the mere thought of it, {she} hid under a blanket and counted to a hundred.",
                "One {when}, {she} was so frightened that {she} hid {spot}.",
            ),
            (
                'Then {a_h} sat down beside {them} and said, "{f0}"',
                '"{f0}" said {a_h}, {hgift}.',
            ),
            (
                "So they went out together, one small step after another.",
                "{C} took {h} by the hand and opened {her} eyes, first one and then the other.",
            ),
            (
                "Since that {when}, {c} has not been afraid of {t} any more.",
                "{C} began to laugh, and {t} did not seem so bad after all.",
            ),
        ),
    ),
    "built": (
        "The {Cn} and the {N}",
        ("built {t}", "built {t}", "wanted to build {t}"),
        (
            (
                "One {when}, {she} decided to build {t} {f0}.",
                "{She} had a plan: {she} would build {t} {f0}.",
            ),
            (
                "{She} worked from dawn to dusk, but {f1}.",
                "{C} hammered and measured all week, but {f1}.",
            ),
            (
                "Then {a_h}, {hgift}, came along with {f2}.",
                '"What you need is {f2}," said {a_h}.',
            ),
            (
                "They worked side by side until the {n} was ready.",
                "Together they tried once more, and this time the {n} held.",
            ),
            (
                "The {n} {f3}, and everybody cheered.",
                "When the sun came up, the {n} {f3}.",
            ),
        ),
    ),
    "shared": (
        "The {Cn} Who Shared {T}",
        ("shared {t}", "shared {t}", "had only {t} to share"),
        (
            (
                "One {when}, {she} had {f0}, just enough for one.",
                "One {when}, {she} sat down in front of {f0}.",
            ),
            (
                "{She} had been looking forward to it all day.",
                "It smelled so good that even the curtains leaned closer.",
            ),
            (
                "Just then {a_h} came to the door with an empty bowl.",
                "Outside stood {a_h}, {hgift}, cold and hungry.",
            ),
            (
                '"Come in and sit down," said {c}, and {she} shared the {n} with {h}.',
                "{C} cut the {n} in two and gave {h} the bigger half, for that is how {she} shared.",
            ),
            (
                "A week later {h} came back with a present: {junk}, tied with a ribbon.",
                "Shared like that, the {n} tasted twice as good.",
            ),
        ),
    ),
    "met": (
        "The {Cn} and the {N}",
        ("met {t}", "met {t}", "made friends with {t}"),
        (
            (
                "One {when}, {she} met {a_h} {wherever}.",
                "One {when}, {she} heard a noise {spot}, and out came {a_h}.",
            ),
            (
                "At first neither of them dared to say a word.",
                "They looked at each other for a long, long time.",
            ),
            (
                '"Good {day}," said {h}, {hgift}, "will you play with me?"',
                "Then {h} held out {junk} and they both began to laugh.",
            ),
            (
                "They played until the stars came out.",
                "{C} showed {h} the way to the river, and {h} showed {c} where the wild cherries grow.",
            ),
        ),
    ),
    "followed": (
        "The {Cn} Who Followed {T}",
        ("followed {t}", "followed {t}", "once followed {t}"),
        (
            (
                "One {when}, {she} noticed {t} and followed it.",
                "One {when}, {c} followed {t} out of the door without even putting on a hat.",
            ),
            (
                "It led {them} over three hills and through a sleeping town.",
                "The way was long, and {she} had nothing in {her} bag but {junk}.",
            ),
            (
                'On the road {a_h} asked, "May I come along?"',
                "Halfway there {she} met {a_h}, {hgift}, and they went on together.",
            ),
            (
                "At the very end they found {f0}.",
                "And what did they find there? They found {f0}.",
            ),
        ),
    ),
    "wished": (
        "The {Cn} Who Wished for {T}",
        ("wished for {t}", "wished for {t}", "made a wish for {t}"),
        (
            (
                "One {when}, {she} wished for {t} and whispered it to the evening star.",
                "{C} had only one wish, and {she} wished for {t} with all {her} heart.",
            ),
            (
                "{She} waited and waited, but nothing happened.",
                "Nobody seemed to have heard, not even the moon.",
            ),
            (
                '"Wishes need company," said {a_h}, and sat down to wait with {them}.',
                "Only {a_h}, {hgift}, had heard, and kept {them} company.",
            ),
            (
                "And then, as softly as a breath, {f0}.",
                "They closed their eyes, and when they opened them again, {f0}.",
            ),
        ),
    ),
}

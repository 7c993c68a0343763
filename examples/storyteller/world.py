"""What the stories are made of: characters, places and the ten kinds of trouble, as plain tables.

Each table row links words that belong together (an object and what it is good for, a fear and the sentence
that cures it), so that a model that has read enough stories can only continue them sensibly.
"""

from dataclasses import dataclass


def _rows(text: str) -> list[tuple[str, ...]]:
    return [tuple(cell.strip() for cell in line.split("|")) for line in text.strip().splitlines()]


@dataclass(frozen=True, slots=True)
class Character:
    """Somebody who can lead a story or help in one."""

    noun: str
    pronoun: str  # "she" or "he", fixed for each noun so that a story never changes it
    trait: str
    home: str  # with its preposition, after "who lived"
    gift: str  # a clause about the character, between commas


@dataclass(frozen=True, slots=True)
class Place:
    """Where a story may be set: "in the old mill"."""

    where: str
    spot: str  # where things lie hidden there


@dataclass(frozen=True, slots=True)
class Topic:
    """What happens: `kind` picks the plot, `phrase` names the thing in it, `facts` fill the plot's blanks."""

    kind: str
    phrase: str  # with its article where it has one: "a lantern", "the dark", "sing"
    noun: str  # without the article: "lantern"
    facts: tuple[str, ...]


def article(noun: str) -> str:
    """The noun with "a" or "an" in front."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


CHARACTERS = tuple(
    Character(*row)
    for row in _rows("""
fox | she | clever | in a den under the old oak | whose nose missed nothing
owl | she | wise | in a hollow elm tree | who could see in the dark
bear | he | gentle | in a cave behind the waterfall | who was as strong as a storm
mouse | she | tiny | in a hole beneath the stairs | who could slip through any gap
rabbit | he | quick | in a burrow by the meadow | who ran faster than the rain
hedgehog | he | shy | under a pile of golden leaves | who noticed every small thing
badger | he | grumpy | in a sett under the hill | who had dug every tunnel in the valley
otter | she | playful | at a bend of the stream | who could hold her breath the longest
squirrel | she | busy | at the top of a walnut tree | who never forgot a hiding place
crow | he | curious | up in the church tower | who saw the whole valley from above
frog | he | cheerful | in a pond full of lilies | who knew a joke for every day
turtle | she | patient | on the warm stones by the lake | who had never been in a hurry
cat | she | proud | in the window of the bakery | who landed on her feet every time
dog | he | loyal | in a red kennel by the gate | who never gave up a trail
goat | she | stubborn | on a steep green slope | who could climb anything
donkey | he | slow | in a stable with a leaky roof | who could carry anything
goose | she | noisy | by the village pond | who was afraid of nobody
duck | she | merry | among the reeds | who knew the river by heart
mole | he | quiet | in a tunnel with seven doors | who could feel every footstep in the ground
snail | she | careful | under a cabbage leaf | who carried her house on her back
beetle | he | shiny | inside a fallen log | who could lift ten times his weight
spider | she | skilful | in a web above the door | who could mend anything with thread
whale | he | lonely | in the deep blue bay | whose voice carried for a hundred miles
crab | he | cautious | in a pool between the rocks | who looked at everything from the side
penguin | he | polite | at the edge of the ice | who was never cold
wolf | he | lonesome | in the dark pine woods | who could hear the snow fall
deer | she | graceful | in a clearing full of ferns | who stepped without a sound
lion | he | sleepy | in the shade of a fig tree | whose roar could wake the stars
elephant | she | thoughtful | beside a muddy river | who remembered everything
monkey | he | cheeky | in a swinging tree | who could reach the highest branch
dragon | she | young | on a mountain of ash | whose breath could light any fire
giant | he | kind | in a house as tall as a church | who could see over the hills
witch | she | forgetful | in a crooked cottage | who knew the name of every herb
wizard | he | absent-minded | in a round stone tower | who had read every book twice
knight | she | brave | in a small grey fort | who kept every promise
king | he | tired | in a palace with a hundred rooms | who listened before he spoke
queen | she | restless | in a palace by the sea | who had sailed around the world
robot | he | rusty | in a workshop full of springs | who could count to a million
baker | he | friendly | above a warm little shop | whose bread could cheer up anyone
gardener | she | cheery | in a cottage covered with roses | who could make a stone bloom
tailor | he | neat | in a narrow street | whose needle was never still
painter | she | dreamy | in a room under the roof | who saw colours that nobody else saw
shepherd | he | calm | in a hut on the moor | who knew every path in the hills
miller | he | hearty | beside a turning wheel | who got up before the sun
ghost | he | timid | in an empty manor | who could walk through walls
scarecrow | he | ragged | in a field of barley | who had time to think
snowman | he | jolly | in the yard behind the school | who never felt the cold
astronaut | she | daring | in a silver ship near the moon | who had counted the stars
""")
)

NAMES = {
    "she": ("Ada", "Bella", "Clara", "Dora", "Etta", "Flora", "Greta", "Ivy", "Juno", "Lily", "Mina", "Nora",
            "Olive", "Pippa", "Rosa", "Tilda"),
    "he": ("Albert", "Basil", "Casper", "Dexter", "Emil", "Felix", "Gus", "Hugo", "Jasper", "Leo", "Milo",
           "Oscar", "Pip", "Rufus", "Theo", "Wilbur"),
}  # fmt: skip

TRAITS = ("little", "brave", "clever", "kind", "quiet", "cheerful", "curious", "lonely", "sleepy", "old",
          "young", "gentle", "proud", "merry")  # fmt: skip

PLACES = tuple(
    Place(*row)
    for row in _rows("""
in the old mill | under the millstone
in the deep forest | between the roots of a beech
by the harbour | inside a coil of rope
on the windy hill | under a flat grey stone
in the market | behind the apple barrels
by the river | among the reeds
in the castle | behind a dusty curtain
in the library | between two heavy books
at the lighthouse | on the lowest stair
in the orchard | at the foot of a pear tree
on the farm | beneath the hay
in the snowy mountains | under a drift of snow
in the desert | behind a tall dune
on the beach | under a heap of seaweed
in the attic | inside a broken trunk
in a quiet village | behind the well
at the railway station | under the last bench
in the rose garden | beneath a thorny bush
under the stone bridge | on a ledge above the water
in the bakery | behind the flour sacks
in the misty swamp | on a floating log
on the moon | at the bottom of a crater
at the summer fair | under the merry-go-round
in the green valley | in a patch of clover
in the schoolhouse | behind the blackboard
by the lake | inside an old rowing boat
in the dark cave | in a crack in the wall
in the tall tower | under the spiral stairs
on a small island | in the shade of a palm
in the greenhouse | under an empty flower pot
""")
)

_OBJECTS = _rows("""
lantern | lit the path at night | a warm glow | behind the woodpile
key | opened the garden gate | a glint of brass | under the doormat
map | showed every road in the land | a corner of yellow paper | inside a boot
bell | rang for supper | a soft ringing | in the tall grass
drum | kept time on long walks | a dull thump | behind the barn
flute | could call the birds | a thin whistling | in a hollow log
scarf | kept the north wind out | a flash of red wool | on a bramble
hat | kept off the rain | a round brown brim | in a puddle
mitten | matched no other | a scrap of blue wool | on a fence post
umbrella | turned storms into music | a curved wooden handle | behind the door
compass | always pointed home | a trembling needle | in a bird's nest
book | told a new tale every evening | a ribbon between pages | under a pillow
teapot | poured the sweetest tea | a curl of steam | on a window sill
spoon | stirred every soup | a silver gleam | in the bottom of a jar
clock | never told a lie | a steady ticking | under the bed
crown | was far too big | a golden sparkle | in the duck pond
button | held a coat together | a small round shine | in a coat pocket
ribbon | had won first prize | a flutter of green silk | on a rose bush
kite | had touched the clouds | a long paper tail | in the top of an elm
balloon | was as yellow as the sun | a bobbing string | under the ceiling
marble | held a swirl of blue | a glassy wink | in a mouse hole
ring | had belonged to a grandmother | a tiny bright circle | inside a loaf of bread
mirror | made everyone smile | a dancing spot of light | behind the wardrobe
candle | smelled of honey | a trail of wax | on the cellar steps
feather | had come from a phoenix | a red shimmer | on the roof
pebble | stayed warm all winter | a smooth white gleam | in the stream
shell | held the sound of the sea | a faint humming | in the sand
acorn | was meant for planting | a small brown cap | under the oldest tree
blanket | was as soft as a cloud | a fringe of wool | on the washing line
basket | carried the picnic | a woven handle | behind the hedge
boot | had walked a thousand miles | a muddy lace | beside the ditch
whistle | could stop a train | a shrill peep | in a flower pot
violin | knew all the old songs | a trembling string | in the hayloft
puppet | could make the king laugh | a painted smile | in a toy chest
telescope | brought the stars closer | a ring of polished brass | on the chimney
paintbrush | could paint the wind | a drop of blue paint | in an empty cup
bucket | fetched the morning water | a rattling handle | beside the well
letter | had come from far away | a red wax seal | under a stone
seed | would grow into a giant flower | a green shoot | between two bricks
star chart | named every light in the sky | a dotted line of silver | behind the bookcase
""")

_BREAKABLE = ("lantern", "bell", "drum", "flute", "umbrella", "compass", "teapot", "clock", "crown", "kite",
              "mirror", "violin", "puppet", "telescope", "bucket", "shell")  # fmt: skip

_SKILLS = _rows("""
sing | only a squeak came out | sang so sweetly that the birds fell silent
dance | two left feet got in the way | danced until the lamps burned low
swim | the water went straight up the nose | swam from one bank to the other
juggle | the apples rolled in all directions | juggled seven apples at once
paint | the colours ran together like mud | painted a sunrise that glowed in the dark
bake bread | the dough came out as hard as a brick | baked a loaf as light as a cloud
whistle | nothing came but air | whistled a tune that the wind carried away
skate | the ice seemed to jump up | skated across the pond like a swallow
ride a bicycle | the wheels wobbled into a hedge | rode all the way around the square
read | the letters hopped about like fleas | read a whole story out loud
knit | the wool tied itself into a knot | knitted a scarf as long as the street
play the violin | it sounded like a rusty gate | played a song that made the moon lean closer
tell jokes | nobody laughed at all | told a joke that made even the statues smile
row a boat | it went round and round in circles | rowed across the lake in one breath
cook soup | it tasted of old socks | cooked a soup that the whole street came to taste
write poems | every line ended in a blot | wrote a poem that everyone learned by heart
fly a kite | it fell into the nettles | flew a kite above the highest cloud
catch the moon | it slipped away behind a cloud | caught the moon in a bowl of water
""")

_FEARS = _rows("""
the dark | The dark is only the day with its eyes closed.
thunder | Thunder is only the sky playing its drum.
deep water | Water carries everyone who trusts it.
the wind | The wind only wants somebody to dance with.
high places | Look at the clouds and not at your feet.
shadows | A shadow is a friend who never leaves you.
strangers | A stranger is a friend whose name you do not know yet.
the winter | Winter is only the world taking a nap.
loud noises | A loud noise is only a quiet one in a hurry.
ghosts | A ghost is only a guest who forgot to knock.
crowds | A crowd is only many people who hope for a smile.
getting lost | Nobody is lost who has somebody to ask.
""")

_BUILDS = _rows("""
boat | to sail across the lake | it leaked like a basket | a pot of sticky resin | floated like a leaf
raft | to drift down the river | the logs rolled apart | a bundle of strong rope | drifted past the willows
bridge | to cross the stream | the planks kept sliding away | a box of long nails | stood firm in every flood
tree house | to sleep among the leaves | the floor was crooked | a straight ruler | rocked softly in the wind
snow fort | to welcome the winter | the walls melted by noon | a cart of fresh snow | shone like a palace
ladder | to pick the highest cherries | the rungs came loose | a jar of wood glue | reached into the sky
cart | to carry apples to town | one wheel was square | a perfectly round wheel | rolled without a squeak
windmill | to grind the corn | the sails would not turn | four bed sheets | turned in every breeze
rocket | to visit the moon | it only coughed and smoked | a jug of apple juice | flew around the moon
swing | to touch the clouds | the rope was too short | a longer rope | swung higher than the roof
robot dog | to keep the house safe | it barked at chairs | a set of springs | wagged its tail with a click
sand castle | to live in for a day | the tide took it away | a wall of pebbles | stood until the moon rose
""")

_FOODS = _rows("""
pie | an apple pie with a golden crust
cake | a honey cake as round as the moon
loaf of bread | a loaf of bread still warm from the oven
pot of soup | a pot of thick green soup
jar of jam | a jar of strawberry jam
bowl of berries | a bowl of sweet blue berries
bag of nuts | a bag of roasted nuts
wheel of cheese | a wheel of yellow cheese
pot of tea | a pot of peppermint tea
basket of plums | a basket of ripe plums
plate of pancakes | a plate of thin pancakes
pumpkin | a pumpkin baked with cinnamon
""")

_TRAILS = _rows("""
a strange light | a thousand fireflies dancing over the water
a distant song | an old music box that played for nobody
a trail of footprints | a lost lamb that was waiting to be found
a paper boat | a lake that no map had ever shown
a falling star | a warm stone that hummed a lullaby
the smell of bread | a table with two empty chairs
a white butterfly | a meadow where it was always spring
an echo | a valley where every word was sung back
a red thread | a grandmother who was knitting the longest scarf in the world
a silver cloud | a mountain top where the rain is made
a ringing bell | a tiny school for mice
a lost balloon | a fair with lights of every colour
""")

_WISHES = _rows("""
snow | by morning every roof was as white as sugar
a friend | there was a shy knock at the door
rain | the first fat drops drummed on the leaves
wings | a flock of swans offered a ride above the clouds
a garden | green shoots pushed up between the stones
a birthday cake | the whole street came with candles and cream
a longer summer | the swallows stayed for one more week
a quiet night | even the crickets put away their fiddles
a rainbow | seven colours bent over the hills
a letter | the postman came running up the path
a brother | a small stranger asked if there was a spare bed
music | a band of wandering players stopped at the gate
""")


def _object(kind: str, row: tuple[str, ...]) -> Topic:
    return Topic(kind, article(row[0]), row[0], row[1:])


TOPICS = (
    *(_object("lost", row) for row in _OBJECTS),
    *(_object("found", row) for row in _OBJECTS),
    *(_object("broke", row) for row in _OBJECTS if row[0] in _BREAKABLE),
    *(Topic("learned", row[0], row[0], row[1:]) for row in _SKILLS),
    *(Topic("feared", row[0], row[0], row[1:]) for row in _FEARS),
    *(_object("built", row) for row in _BUILDS),
    *(_object("shared", row) for row in _FOODS),
    *(Topic("met", article(one.noun), one.noun, (one.trait, one.gift)) for one in CHARACTERS),
    *(Topic("followed", row[0], row[0].split(" ", 1)[1], row[1:]) for row in _TRAILS),
    *(Topic("wished", row[0], row[0].removeprefix("a "), row[1:]) for row in _WISHES),
)

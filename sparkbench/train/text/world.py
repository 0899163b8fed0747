"""The small world of the chat documents: topics with tips and reasons, things explained, animals, stories.

Texts are templates of `grammar.fill`. The facts are simple, and true enough for a world of this size.
"""

from __future__ import annotations

TOPICS = {
    "sleep better": (
        "<go to bed|try to go to bed|lie down> at the same time <every day|each night|all week>",
        "<turn off|put away|leave> the phone <an hour before bed|in the evening|when it gets late>",
        "<keep|make|leave> the room <dark and quiet|cool and dark|quiet and cool>",
        "<do not drink|drink no|stay away from> coffee <after lunch|in the evening|late in the day>",
        "<read|take time for> a <good book|quiet book|few pages> <in bed|before you sleep|at night>",
    ),
    "learn a new language": (
        "<learn|write down|repeat> a few new words <every day|each morning|day by day>",
        "<listen to|sing along with|look for> <songs|easy songs|short stories> in the language",
        "<speak|talk|practice> with <a friend|other people|a partner> <every week|as often as you "
        "can|when you can>",
        "<read|try to read> <easy books|short texts|simple stories> <first|at the start|step by step>",
        "<do not worry|do not be afraid|never mind> when you make <a mistake|small mistakes|mistakes>",
    ),
    "save money": (
        "<write down|make a list of|look at> <what you buy|all you spend|your costs> <every day|each "
        "week|every month>",
        "<cook|eat|make your meals> at home <more often|most days|when you can>",
        "<walk|take the bus|ride a bike> <instead of driving|when you can|to work>",
        "<wait|think again|sleep on it> before you buy <something big|new things|what you want>",
        "<put|set> <a little|some money|a small part> aside <every month|each week|at the start of the "
        "month>",
    ),
    "stay healthy": (
        "<eat|have|enjoy> <fresh fruit|green vegetables|good food> <every day|at each meal|each morning>",
        "<drink|have|take> <enough water|a lot of water|water or tea> <during the day|every day|with "
        "your meals>",
        "<go for|take|enjoy> a <walk|long walk|short run> <in the park|after dinner|each morning>",
        "<sleep|rest|stay in bed> <enough|for eight hours|as long as you need> <every night|each "
        "night|at night>",
        "<take time|make time|find time> <for your friends|to rest|for what you love>",
    ),
    "prepare for an exam": (
        "<make|write|start with> a <plan|simple plan|list> for <each day|the week|every day>",
        "<read|repeat|go over> your notes <in the morning|every day|once more>",
        "<solve|try|work on> <old exams|some exercises|a few questions> <by yourself|with a friend|step "
        "by step>",
        "<take|have|plan> <short breaks|a break|some rest> <after an hour|now and then|in between>",
        "<explain|teach|tell> what you <know|learned|have read> to <a friend|someone else|your family>",
    ),
    "keep a small garden": (
        "<water|look after|check> the plants <in the morning|every evening|when it is dry>",
        "<choose|find|pick> a place with <a lot of light|enough sun|good soil>",
        "<start|begin> with <easy plants|herbs and beans|a few flowers>",
        "<pull out|remove|take out> the weeds <every week|by hand|when you see them>",
        "<give|add|bring> <fresh soil|some compost|good earth> to the <beds|roots|plants> <in "
        "spring|once a year|now and then>",
    ),
    "make new friends": (
        "<join|look for|find> a <club|sports team|small group> <near you|in your town|that you like>",
        "<smile|say hello|be kind> <when you meet people|to your neighbors|to new people>",
        "<ask|talk to> people <about their day|about what they like|how they are>",
        "<listen|pay attention> <with care|when others talk|to what they say>",
        "<invite|ask> <someone|a neighbor|your group> <for tea|to dinner|for a walk>",
    ),
}  # fmt: skip

EXPLAINED = {
    "rain": ("<water|the water of seas and lakes|a lot of water> <rises|goes up> <into the air|to the "
             "sky> <when the sun is warm|with the warm air|as the sun heats it>",
             "<high up|up there|in the cold air> it <cools down|gets cold|turns cold> and <makes "
             "clouds|forms small drops|becomes a cloud>",
             "<when the drops are heavy|when they are too heavy|in the end> they <fall down|fall to the "
             "ground|come back> as rain"),
    "a bicycle": ("a bicycle <has|comes with|runs on> two wheels and <a seat|a strong frame|a chain>",
                  "<you push the pedals|the rider moves the pedals|your feet turn the pedals>, and <the "
                  "chain|a chain> <turns|moves> the <back wheel|wheel at the back>",
                  "<it needs no fuel|it is quiet and cheap|it makes no noise>, so <many people|people in "
                  "towns|a lot of people> <like it|use it every day|ride to work>"),
    "a library": ("a library is a <place|house|building> with <many books|a lot of books|books for everyone>",
                  "<you can|people can|visitors may> <borrow a book|take books home|read there> <for a "
                  "few weeks|for some time|for free>",
                  "<it is quiet there|the rooms are quiet|it is a calm place>, so it is <good for "
                  "reading|a fine place to study|easy to think>"),
    "the moon": ("the moon is a <large ball of rock|ball of rock and dust|world of rock> that <moves "
                 "around|goes around|circles> the earth",
                 "it <has no light of its own|does not shine by itself|makes no light> but <sends "
                 "back|reflects|gives back> the light of the sun",
                 "<it takes about a month|it needs a month|it needs four weeks> "
                 "<to go around us|until it is back|for one full round>"),
    "bread": ("bread is <made from|baked from|a food of> <flour and water|flour, water and salt|water, "
              "flour and yeast>",
              "<the dough must rest|you let the dough rest|the dough rises> <for an hour|in a warm "
              "place|before you bake it>",
              "<then it is baked|after that it goes|now it is put> in <a hot oven|the oven|a very hot "
              "oven> <until it is brown|for some time|for an hour>"),
    "a computer": ("a computer is a machine that <follows rules|works with numbers|does what programs say>",
                   "<a program|the program|software> <tells it|says|shows it> <what to do|each step|the "
                   "next step>",
                   "<it is very fast|it never gets tired|it makes few mistakes>, so <we use it|people "
                   "use it|it helps us> <for work and play|every day|in many places>"),
    "wind": ("wind is <air that moves|moving air|air on its way>",
             "<the sun warms|sunlight heats|the sun heats> <some places|the land|the ground> <more than "
             "others|more than the sea|faster>",
             "<warm air goes up|the warm air rises|light air rises>, and <cold air|cool air|heavy air> "
             "<takes its place|flows in|comes in below>"),
    "a bank": ("a bank is a <place|company|house> that <keeps money safe|looks after money|takes care of "
               "money>",
               "<people bring|you can bring|families bring> <their savings|some money|what they save> "
               "and <get a little more back|earn some interest|can take it out later>",
               "<it also lends|the bank lends|with this it lends> money <to people who need it|for a new "
               "house|to small shops>"),
}  # fmt: skip

ANIMALS = {
    "cat": ("fish", "house", "four"),
    "dog": ("meat", "house", "four"),
    "horse": ("grass", "stable", "four"),
    "cow": ("grass", "farm", "four"),
    "duck": ("grain", "pond", "two"),
    "owl": ("mice", "forest", "two"),
    "fox": ("mice", "forest", "four"),
    "bear": ("honey", "forest", "four"),
    "frog": ("flies", "pond", "four"),
    "hen": ("grain", "farm", "two"),
    "rabbit": ("carrots", "field", "four"),
    "mouse": ("cheese", "house", "four"),
}

KINDS = {
    "animals": ("cat", "dog", "horse", "cow", "duck", "owl", "fox", "bear", "frog", "rabbit"),
    "fruits": ("apple", "pear", "cherry", "lemon", "plum", "grape", "orange", "banana"),
    "colors": ("red", "blue", "green", "yellow", "white", "black", "brown", "gray"),
    "tools": ("hammer", "saw", "knife", "brush", "needle", "ladder", "shovel"),
    "drinks": ("water", "tea", "coffee", "milk", "juice", "lemonade"),
    "vegetables": ("carrot", "bean", "onion", "potato", "tomato", "cabbage", "pea"),
}  # fmt: skip

OPPOSITES = {
    "big": "small",
    "hot": "cold",
    "old": "new",
    "fast": "slow",
    "happy": "sad",
    "light": "dark",
    "early": "late",
    "strong": "weak",
    "full": "empty",
    "loud": "quiet",
    "wet": "dry",
    "high": "low",
}

# Present, past and future of one small sentence each, without the subject.
ACTIONS = {
    "buys a book": ("bought a book", "will buy a book"),
    "goes to the market": ("went to the market", "will go to the market"),
    "sings a song": ("sang a song", "will sing a song"),
    "writes a letter": ("wrote a letter", "will write a letter"),
    "eats an apple": ("ate an apple", "will eat an apple"),
    "sees a bird": ("saw a bird", "will see a bird"),
    "makes a cake": ("made a cake", "will make a cake"),
    "takes the bus": ("took the bus", "will take the bus"),
    "plays in the garden": ("played in the garden", "will play in the garden"),
    "reads the paper": ("read the paper", "will read the paper"),
    "drinks some tea": ("drank some tea", "will drink some tea"),
    "opens the window": ("opened the window", "will open the window"),
}
TIMES = (
    "in the morning",
    "after lunch",
    "in the evening",
    "with a friend",
    "before dinner",
    "by the sea",
    "with some friends",
)

HEROES = ("fox", "owl", "rabbit", "bear", "mouse", "frog", "cat", "duck")
FINDS = ("key", "map", "lamp", "letter", "coin", "shell", "door", "boat")

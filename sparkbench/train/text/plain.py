"""The plain programming tasks of the code documents: digits, factors, rectangles, strings, simple lists.

Each is a `tasks.Task` with its ways to write it and a reference that the examples are computed with.
"""

from __future__ import annotations

from math import factorial

from sparkbench.train.text.tasks import Task

PLAIN: tuple[Task, ...] = (
    Task(
        "digits",
        "<sum_digits|digit_sum|add_digits>",
        ("n",),
        "int",
        "<return|compute|find> the sum of the digits of a number",
        (
            "@r = 0\nwhile @p:\n    @r += @p % 10\n    @p //= 10\nreturn @r",
            "return sum(int(@x) for @x in str(@p))",
        ),
        "<takes the digits of the number one by one|looks at every digit of the number> and <adds them "
        "up|adds each to the sum>",
        lambda n: sum(int(d) for d in str(n)),
    ),
    Task(
        "factorial",
        "<factorial|compute_factorial|product_to>",
        ("n",),
        "int",
        "<return|compute|find> the <factorial of a number|product of the numbers from 1 up to a number>",
        (
            "@r = 1\nfor @x in range(1, @p + 1):\n    @r *= @x\nreturn @r",
            "return 1 if @p == 0 else @p * @f(@p - 1)",
        ),
        "<starts with one|begins with one> and <multiplies by each number in turn|takes the numbers one "
        "by one as factors>",
        factorial,
    ),
    Task(
        "sum_to",
        "<sum_to|sum_up_to|add_up_to>",
        ("n",),
        "int",
        "<return|compute|find> the sum of <all numbers|the whole numbers> from 1 <up to|to> a number",
        ("@r = 0\nfor @x in range(1, @p + 1):\n    @r += @x\nreturn @r", "return @p * (@p + 1) // 2"),
        "<counts from one up to the number|takes all numbers from one up> and <finds their sum|adds them together>",
        lambda n: sum(range(n + 1)),
    ),
    Task(
        "prime",
        "<is_prime|check_prime|prime>",
        ("n",),
        "bool",
        "<check|test|decide> whether a number is <prime|a prime number>",
        (
            "for @x in range(2, @p):\n    if @p % @x == 0:\n        return False\nreturn @p not in (0, 1)",
            "return @p not in (0, 1) and all(@p % @x for @x in range(2, @p))",
        ),
        "<tries every smaller number|goes through the smaller numbers> and <looks for a divisor|checks "
        "if one divides the number>",
        lambda n: n > 1 and all(n % d for d in range(2, n)),
    ),
    Task(
        "divisors",
        "<count_divisors|divisor_count|number_of_divisors>",
        ("n",),
        "int",
        "<count|find the number of|return the number of> <divisors of a number|numbers that divide a number>",
        (
            "@r = 0\nfor @x in range(1, @p + 1):\n    if @p % @x == 0:\n        @r += 1\nreturn @r",
            "return sum(1 for @x in range(1, @p + 1) if @p % @x == 0)",
        ),
        "<tries every number from one up|tests all the numbers up to it> and <counts those that divide "
        "it|adds one for each divisor>",
        lambda n: sum(n % d == 0 for d in range(1, n + 1)),
    ),
    Task(
        "area",
        "<rectangle_area|area|area_of_rectangle>",
        ("n", "m"),
        "int",
        "<return|compute|find> the area of a rectangle <from its sides|with two given sides>",
        ("return @p * @q", "@r = @p * @q\nreturn @r"),
        "<multiplies the two sides|takes the product of the sides>, <which is the area|and that is the area>",
        lambda a, b: a * b,
    ),
    Task(
        "perimeter",
        "<rectangle_perimeter|perimeter|perimeter_of_rectangle>",
        ("n", "m"),
        "int",
        "<return|compute|find> the perimeter of a rectangle <from its sides|with two given sides>",
        ("return 2 * (@p + @q)", "@r = 2 * @p + 2 * @q\nreturn @r"),
        "<adds the two sides|takes the sum of the sides> and <doubles it|multiplies that by two>",
        lambda a, b: 2 * (a + b),
    ),
    Task(
        "difference",
        "<difference|distance|absolute_difference>",
        ("n", "m"),
        "int",
        "<return|compute|find> the <distance between two numbers|absolute difference of two numbers>",
        ("return abs(@p - @q)", "return max(@p, @q) - min(@p, @q)"),
        "<subtracts one number from the other|takes the two numbers apart> and <drops the sign|makes "
        "the result positive>",
        lambda a, b: abs(a - b),
    ),
    Task(
        "vowels",
        "<count_vowels|number_of_vowels|vowel_count>",
        ("text",),
        "int",
        "<count|find the number of|return the number of> <vowels in a text|the vowels in a string>",
        (
            '@r = 0\nfor @x in @p:\n    if @x in "aeiou":\n        @r += 1\nreturn @r',
            'return sum(1 for @x in @p if @x in "aeiou")',
        ),
        "<looks at every letter|goes through the letters> and <adds one for each vowel|counts it if it is a vowel>",
        lambda s: sum(c in "aeiou" for c in s),
    ),
    Task(
        "reverse_text",
        "<reverse_text|reverse|backwards>",
        ("text",),
        "str",
        "<return|give back|build> a <text|string> <backwards|in reverse order>",
        ("return @p[::-1]", '@r = ""\nfor @x in @p:\n    @r = @x + @r\nreturn @r'),
        "<takes the letters from the end to the start|puts every letter before the earlier ones>, <so "
        "the order is turned around|which turns the text around>",
        lambda s: s[::-1],
    ),
    Task(
        "palindrome",
        "<is_palindrome|check_palindrome|same_backwards>",
        ("text",),
        "bool",
        "<check|test|decide> whether a <text|string> <is a palindrome|reads the same backwards>",
        ("return @p == @p[::-1]", "@r = @p[::-1]\nreturn @p == @r"),
        "<turns the text around|makes a copy in reverse order> and <compares both|checks that nothing has changed>",
        lambda s: s == s[::-1],
    ),
    Task(
        "reverse_list",
        "<reverse_list|reversed_copy|turn_around>",
        ("numbers",),
        "list[int]",
        "<return|give back|build> a list <backwards|in reverse order>",
        (
            "return @p[::-1]",
            "return list(reversed(@p))",
            "@r = []\nfor @x in @p:\n    @r.insert(0, @x)\nreturn @r",
        ),
        "<goes from the end to the start|takes the last number first>, <so the order is turned "
        "around|which turns the list around>",
        lambda xs: xs[::-1],
    ),
    Task(
        "unique",
        "<unique|remove_duplicates|distinct>",
        ("numbers",),
        "list[int]",
        "<return|give back|build> a list without <duplicates|repeated numbers>",
        (
            "@r = []\nfor @x in @p:\n    if @x not in @r:\n        @r.append(@x)\nreturn @r",
            "return list(dict.fromkeys(@p))",
        ),
        "<keeps only the first of equal numbers|takes each number only once> and <leaves the order as "
        "it is|does not change the order>",
        lambda xs: list(dict.fromkeys(xs)),
    ),
    Task(
        "descending",
        "<sort_descending|sort_down|largest_first>",
        ("numbers",),
        "list[int]",
        "<sort|order> the numbers of a list from <largest to smallest|high to low>",
        (
            "return sorted(@p, reverse=True)",
            "return sorted(@p)[::-1]",
            "@r = sorted(@p)\n@r.reverse()\nreturn @r",
        ),
        "<sorts a copy of the list|puts the numbers in order> and <has the largest one first|begins "
        "with the largest number>",
        lambda xs: sorted(xs, reverse=True),
    ),
    Task(
        "running",
        "<running_sum|running_total|sums_so_far>",
        ("numbers",),
        "list[int]",
        "<return|compute|build> the list of <running sums|running totals> of a list",
        (
            "@r = []\ns = 0\nfor @x in @p:\n    s += @x\n    @r.append(s)\nreturn @r",
            "return [sum(@p[:i + 1]) for i in range(len(@p))]",
        ),
        "<adds the numbers one after the other|keeps a sum of what came before> and <stores each sum on "
        "the way|writes down the sum each time>",
        lambda xs: [sum(xs[: i + 1]) for i in range(len(xs))],
    ),
    Task(
        "lengths",
        "<lengths|word_lengths|get_lengths>",
        ("words",),
        "list[int]",
        "<return|make|build> a list <with|of> the <lengths of the words|length of each word> in a list",
        ("return [len(@x) for @x in @p]", "@r = []\nfor @x in @p:\n    @r.append(len(@x))\nreturn @r"),
        "<takes the length of every word|looks how long each word is> and <puts it in a list|keeps it in the result>",
        lambda ws: [len(w) for w in ws],
    ),
    Task(
        "longest",
        "<longest_word|find_longest|longest>",
        ("words",),
        "str",
        "<return|find|give back> the <longest word in|first of the longest words of> a list",
        ("return max(@p, key=len)", '@r = ""\nfor @x in @p:\n    @r = max(@r, @x, key=len)\nreturn @r'),
        "<compares the words by their length|looks how long each word is> and <keeps the longest "
        "one|gives back the longest>",
        lambda ws: max(ws, key=len),
    ),
    Task(
        "initials",
        "<initials|first_letters|join_initials>",
        ("words",),
        "str",
        "<join|put together> the first letters of the words in a list",
        ('return "".join(@x[0] for @x in @p)', '@r = ""\nfor @x in @p:\n    @r += @x[0]\nreturn @r'),
        "<takes the first letter of every word|looks at where each word begins> and <glues these "
        "letters together|makes one string of them>",
        lambda ws: "".join(w[0] for w in ws),
    ),
)

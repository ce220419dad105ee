"""English word lists: closed classes, so they are short and rarely change.

All in lower case, without the full stop of an abbreviation.
"""

from __future__ import annotations


def words(text: str) -> frozenset[str]:
    """Those of a list with spaces between them."""
    return frozenset(text.split())


# Abbreviations that never end a sentence: a name or a number follows.
TITLES = words(
    "adm asst brig bros capt cdr cmdr col comdr cpl dr ens fr gen gov hon lieut lt maj messrs mgr "
    "mlle mm mme mr mrs ms msgr mt ofc pfc pres prof pvt rep reps rev rt sen sens sgt sr st ste "
    "supt v vs viz cf eg ie e.g i.e ca approx"
)
# End a sentence unless a number follows: No. 5, pp. 3-7.
BEFORE_NUMBERS = words(
    "no nos p pp vol vols fig figs ch chap sec sect art arts eq eqs para par v ver ed eds tab "
    "lib bk op n nn ll ver"
)
# May end a sentence: it ends if the next word is one of STARTERS.
ABBREVIATIONS = words(
    "al etc inc ltd co corp jr sr bros dept univ assn est esq ph ave blvd rd hwy ft oz lb lbs "
    "mi min max hr hrs a.m p.m u.s u.k u.n jan feb mar apr jun jul aug sep sept oct nov dec "
    "mon tue tues wed thu thurs fri sat sun ala ariz ark calif colo conn del fla ga ill ind kan "
    "ky la md mass mich minn miss mo mont neb nev okla ore pa penn tenn tex va vt wash wis wyo "
    "anon orig trans repr rev suppl resp incl excl misc"
)
# Words that often begin a sentence and are not part of a name.
STARTERS = words(
    "a after all also although an and any are as at be because before both but by can could did "
    "do does during each even every finally first for from had has have he hence her here his how "
    "however i if in indeed instead is it its just later let many may meanwhile might moreover "
    "most much my neither never nevertheless no nor not nothing now of often on once one only or "
    "other others our over perhaps shall she should similarly since so some soon still such than "
    "that the their then there therefore these they this those though through thus to today "
    "together too two under unless until upon was we were what when whenever where whereas "
    "whether which while who whom whose why will with within without would yes yet you "
    "your"
)
# Never part of a collocation: they combine with everything.
FUNCTION_WORDS = STARTERS | words(
    "about above across again against am among anything around away been being below between "
    "cannot couldn't didn't doesn't don't done down either else enough etc ever everything few "
    "further get go got hadn't hasn't haven't having him himself herself i'd i'll i'm i've into "
    "isn't it's itself less like made make me mine more must myself near off out own quite rather "
    "said same says see several shan't shouldn't something their them themselves till toward "
    "towards unto up us very wasn't weren't well went whatever won't wouldn't you'd you'll you're "
    "you've yours yourself mr mrs"
)
# Part of a name between two capitalized words: Bank of England, Vincent van Gogh.
CONNECTORS = words("of the de la le du des da di del der den van von und y & - 's ’s")

"""Word lists of languages: abbreviations and words that begin a sentence.

    word_lists("de").titles       # {"dr", "prof", ...}: Dr. Weber, never the end of a sentence

All are in lower case, without the full stop. A letter in lower case with a full stop (z. B., т. е.)
is an abbreviation in all languages but English, so that it need not be listed.
"""

from __future__ import annotations

from dataclasses import dataclass

from palm_ds.text import english_lists as english

ENGLISH = ("en", "zh", "mixed")  # languages whose Latin words are read as English


@dataclass(frozen=True, kw_only=True)
class WordLists:
    """The lists of a language; those of English say more (`english_lists.py`)."""

    titles: frozenset[str] = frozenset()
    """Abbreviations that never end a sentence: a name or a number follows."""
    before_numbers: frozenset[str] = frozenset()
    """End a sentence unless a number follows."""
    abbreviations: frozenset[str] = frozenset()
    """End a sentence only before one of `starters`."""
    endings: frozenset[str] = frozenset()
    """Letters that end a sentence before any capital: the д of и т. д."""
    starters: frozenset[str] = frozenset()
    """Words that often begin a sentence and are not part of a name; l' stands for all with it."""
    connectors: frozenset[str] = frozenset()
    """Part of a name between two capitalized words."""
    function_words: frozenset[str] = frozenset()
    """Never part of a collocation."""


def word_lists(language: str) -> WordLists:
    """The lists of a language; empty ones if it has none here."""
    return _LISTS.get("en" if language in ENGLISH else language, WordLists())


def _lists(
    *,
    titles: str,
    before_numbers: str,
    abbreviations: str,
    starters: str,
    connectors: str,
    endings: str = "",
) -> WordLists:
    return WordLists(
        titles=english.words(titles),
        before_numbers=english.words(before_numbers),
        abbreviations=english.words(abbreviations),
        endings=english.words(endings),
        starters=english.words(starters),
        connectors=english.words(connectors),
        function_words=english.words(starters) | english.words(connectors),
    )


_GERMAN = _lists(
    titles=(
        "dr prof hr hrn fr frl dipl ing med jur phil rer nat hl st bzw vgl ca evtl ggf sog inkl "
        "exkl zzgl geb gest verh gegr bes insb chr mag lic"
    ),
    before_numbers=(
        "nr nrn abb abs art bd bde kap s tab taf ziff jan feb febr apr aug sept okt nov dez str "
        "tel anm aufl ausg fig vol"
    ),
    abbreviations=(
        "mio mrd tsd jh jhd jhdt std min sek usw usf etc allg amtl bzgl co ehem einschl entspr "
        "gem jr sen hrsg hg max zit zw südl nördl östl westl ursprgl lat griech engl franz dt"
    ),
    starters=(
        "aber alle allerdings als also am an anders auch auf aufgrund aus außerdem bei bereits "
        "beide bis bisher da dabei dadurch dafür dagegen daher damals damit danach dann daran "
        "darauf darin darum das dass davon davor dazu dem den denn dennoch der deren deshalb "
        "dessen deswegen die dies diese diesem diesen dieser dieses doch dort durch ebenso ein "
        "eine einem einen einer eines einige einmal endlich er erst es etwa etwas falls fast für "
        "ganz gegen genau gleichzeitig hat hier hinter ich ihr ihre ihrem ihren ihrer im immer in "
        "indem ist ja je jede jeder jedes jedoch jetzt kein keine man manche manchmal mehr mein "
        "meine mit nach nachdem natürlich neben nein nicht nichts niemand noch nun nur ob obwohl "
        "oder oft ohne schließlich schon sehr sein seine seinem seinen seiner seit seitdem selbst "
        "sie sind so sobald sogar solche somit sondern später statt trotz trotzdem über um und "
        "unser unsere unter viele vielleicht vom von vor war warum was wegen weil weiter welche "
        "wenn wer werden wie wieder wir wird wo wurde während zu zudem zuerst zuletzt zum "
        "zunächst zur zwar zwischen"
    ),
    connectors="von vom van zu de & -",  # no preposition beside: all nouns have capitals
)
_FRENCH = _lists(
    titles=(
        "m mm mme mmes mlle mlles dr drs pr prof mgr st ste sts stes gal cel cap lieut av apr env "
        "cf ex vve mr"
    ),
    before_numbers=(
        "p pp art chap fig n nº no vol t tab éd col § al ch éq janv févr avr juil sept oct nov "
        "déc tél sect ex par"
    ),
    abbreviations="bd boul hab ed coll trad dir inc ltée cie jr min max dép arr ind adj",
    starters=(
        "à afin ainsi alors après au aucun aucune aujourd'hui auparavant aussi autour aux avant "
        "avec beaucoup bien bientôt c' car ce ceci cela celle celui cependant ces cet cette ceux "
        "chacun chaque comme comment d'abord d'ailleurs d'après d'autres dans de depuis derrière "
        "des dès devant donc du durant elle elles en encore enfin ensuite entre est et eux grâce "
        "hier ici il ils j' jamais je jusqu' l' la là le les leur leurs lorsqu' lorsque lui ma "
        "mais malgré même mes moi mon n' ne ni non nos notre nous on or ou où outre par parce "
        "parfois parmi pas pendant personne peu peut-être plus plusieurs pour pourquoi pourtant "
        "près puis puisqu' puisque qu' quand quant que quel quelle quelques qui quoi rien s' sa "
        "sans se selon ses seul seule si son sous souvent surtout sur tandis tant tel telle tous "
        "tout toute toutes toujours très trop tu un une vers voici voilà vos votre vous y"
    ),
    connectors="de du des d' la le les et en à au aux sur sous lès von van y & -",
)
_SPANISH = _lists(
    titles=(
        "sr sra sres sras srta srtas dr dra dres dras prof profa ing lic arq gral cnel cap tte "
        "sgto mons sto sta d dña dn fr ud uds vd vds ej cf cfr aprox excmo excma ilmo ilma rvdo "
        "avda av pza ctra"
    ),
    before_numbers=(
        "núm nº n no pág págs p pp art arts fig figs cap caps vol vols t tel tab sec núms tomo ed "
        "ene feb abr jun jul ago sept oct nov dic s ss sig sigs v"
    ),
    abbreviations=(
        "ee uu jj c cía ltda inc dpto depto admón gob esq izda dcha máx mín hab trad coord dir "
        "comp jr"
    ),
    starters=(
        "a además ahora al algo alguien algunas algunos allí antes apenas aquel aquella aquí así "
        "aun aún aunque bajo bien cada casi como cómo con contra cual cuál cualquier cuando "
        "cuándo cuánto de debido del dentro desde después donde dónde durante e el él ella ellas "
        "ellos en entonces entre era es esa esas ese eso esos esta está estas este esto estos fue "
        "gracias ha había hace hacia hasta hay hoy incluso la las le les lo los luego más me mi "
        "mientras mis mucho muchas muchos muy nada nadie ni ningún ninguna no nos nosotros "
        "nuestra nuestro nunca o otra otras otro otros para pero poco por porque pues que qué "
        "quien quién quizá quizás se según ser si sí siempre sin sino sobre sólo solo son su sus "
        "también tampoco tan tanto te tenía tiene toda todas todavía todo todos tras tres tu un "
        "una unas uno unos usted varios y ya yo"
    ),
    connectors="de del la las los el y e da do dos von van & -",
)
_ITALIAN = _lists(
    titles=(
        "sig sigg dott dr prof profs ing avv arch geom rag on sen gen col cap mons don es cfr cf "
        "ca egr gent spett ss"
    ),
    before_numbers=(
        "pag pagg p pp art artt n nn fig figg tab cap capp vol voll sec par gen feb apr mag giu "
        "lug ago sett ott nov dic tel ed t"
    ),
    abbreviations="co inc ltd c circ max min jr trad dir isc coord",
    starters=(
        "a accanto ad adesso ai al all' alla alle allo allora altri anche ancora anzi appena bene "
        "c' che chi ci ciò come comunque con contro così cosa cui da dal dall' dalla dalle "
        "davanti degli dei del dell' della delle dentro di dietro dopo dove dunque durante e è "
        "ecco ed egli ella era erano essa esse essi esso fino forse fra fu già gli grazie ha "
        "hanno i ieri il in infatti infine inoltre insieme intanto invece io l' la le lei lo loro "
        "lui ma mai me meglio mentre mi mia mio molte molti molto ne nei nel nell' nella nelle "
        "nemmeno nessun nessuna nessuno niente no noi non nostra nostro nulla o oggi ogni oltre "
        "oppure ora per perché però più poche pochi poco poi presso prima proprio pure qualche "
        "qualcuno quale quali quando quanto quasi quel quell' quella quelle quelli quello questa "
        "queste questi questo qui quindi se secondo sei sempre senza si sì sia siamo solo sono "
        "sopra soprattutto sotto spesso sta su sua subito sue sugli sui sul sull' sulla suo suoi "
        "tra tu tutta tutte tuttavia tutti tutto un un' una uno vi voi"
    ),
    connectors="di de del della dei degli da dal dalla d' in e il la lo le von van & -",
)
_DUTCH = _lists(
    titles=(
        "dhr hr mevr mw mej mr dr drs ir ing prof ds st bijv bv ca vgl cf jhr jkvr mgr em nl zgn "
        "evt incl excl resp fa chr min max"
    ),
    before_numbers=(
        "nr nrs no blz pag p pp art fig hfst tab vol dl par jan feb febr mrt apr aug sept okt nov "
        "dec tel jl lid bl"
    ),
    abbreviations="mln mld jr sr co inc afd ed red vert gem prov",
    starters=(
        "aan achter al alle alleen als andere bij binnen daar daarbij daardoor daarna daarnaast "
        "daarom daarop dan dat de deze die dit doch door dus een eens eerst elk elke en er ergens "
        "even ge geen haar had heb hebben heeft heel het hier hij hoe hoewel hun ik in indien "
        "inmiddels is ja je jullie kan later maar mag meer men met mijn misschien na naar naast "
        "nadat natuurlijk nee niemand niet niets nog nooit nu of om omdat onder ondanks ongeveer "
        "ons onze ook op over pas rond samen sinds sommige soms tegen ten terwijl toch toen tot "
        "tussen u uit uiteindelijk vaak van vandaag vanaf vanwege veel via volgens voor vooral "
        "vroeger waar waarom wanneer want waren was wat we wel welke werd wie wij wil zal ze zei "
        "zelf zelfs zij zijn zo zoals zodra zonder zou"
    ),
    connectors="van de der den het 't ten ter te en op in aan von & -",
)
_PORTUGUESE = _lists(
    titles=(
        "sr sra srs sras srta dr dra drs dras prof profa profª eng engª arq gen cel cap ten maj "
        "mons d sto sta pe fr ex v exmo exma ilmo ilma cf cfr aprox av r pç trav vª vs"
    ),
    before_numbers=(
        "nº n núm no pág págs p pp art arts fig figs cap caps vol vols t tel tab sec séc ed jan "
        "fev abr jun jul ago set out nov dez inc"
    ),
    abbreviations="c cia ltda depto dept hab máx mín trad org coord dir jr km",
    starters=(
        "a à ainda além algo alguém algumas alguns ali antes ao aos apenas apesar após aquela "
        "aquele aqui as às assim até cada com como contra contudo da das de dela dele depois "
        "desde dessa desse desta deste do dos durante e é ela elas ele eles em embora enquanto "
        "então entre era eram essa essas esse esses esta está estas este estes eu foi foram "
        "graças há havia hoje isso isto já la logo mais mas me mesmo meu minha muita muitas muito "
        "muitos na nada não nas nele nem nenhum ninguém no nos nós nossa nosso nunca num numa o "
        "onde ontem os ou outra outras outro outros para pela pelo pois por porém porque portanto "
        "pouco poucos quais qual quando quanto quase que quem se segundo sem sempre ser seu seus "
        "sim sob sobre só sua suas talvez também tanto tem tinha toda todas todavia todo todos "
        "tudo um uma umas uns você vocês"
    ),
    connectors="de da do das dos e von van & -",
)
_RUSSIAN = _lists(
    titles=(
        "проф акад доц канд св ул пл пер наб просп см ср напр гр тов гос респ обл ст мл инж ген "
        "полк кап лейт оз о"
    ),
    before_numbers=(
        "стр рис табл гл п пп с т тт вып д кв корп № н янв февр апр авг сент окт нояб дек тел "
        "статья изд ч разд"
    ),
    abbreviations="г гг в вв им ок прим ред сост англ нем фр лат греч",
    endings="д п э",
    starters=(
        "а без более больше был была были было в вдруг ведь весь вместе вместо во вокруг вот "
        "впрочем все всё всего всегда всем вы где да даже для до другая другие другой если есть "
        "ещё еще за затем здесь и из или именно иногда их к каждый как какая какие какой ко когда "
        "который кроме кто лишь между мне многие мой моя мы на над надо наконец например наш наша "
        "не него нет ни никто ничего но ну о об однако однажды около он она они оно от перед по "
        "под поэтому после потом потому почему почти при про просто раз разве с сам сегодня "
        "сейчас сначала снова со согласно среди так такая такие также такой там те тем теперь то "
        "тогда тоже только тот ты у уж уже хотя чем через что чтобы эта эти это этот эту я"
    ),
    connectors="и на фон де ван & -",
)
_LISTS = {
    "en": WordLists(
        titles=english.TITLES,
        before_numbers=english.BEFORE_NUMBERS,
        abbreviations=english.ABBREVIATIONS,
        starters=english.STARTERS,
        connectors=english.CONNECTORS,
        function_words=english.FUNCTION_WORDS,
    ),
    "de": _GERMAN,
    "es": _SPANISH,
    "fr": _FRENCH,
    "it": _ITALIAN,
    "nl": _DUTCH,
    "pt": _PORTUGUESE,
    "ru": _RUSSIAN,
}

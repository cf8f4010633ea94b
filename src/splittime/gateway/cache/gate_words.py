"""The English words that the lexical gate knows: words that turn a question around, and words that carry nothing."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NEGATIONS = _words(
    "not no never none nobody nothing nowhere neither nor cannot without except unless hardly barely unable instead "
    "dont doesnt didnt cant couldnt wont wouldnt shouldnt isnt arent wasnt werent hasnt havent hadnt mustnt aint "
    "refuse fail avoid stop lack missing wrong"
)
QUESTIONS = _words("who whom whose when where why many much often far old")
NUMBER_WORDS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion dozen "
    "first second third fourth fifth sixth seventh eighth ninth tenth last once twice thrice half quarter double "
    "triple single both another several few all every each any some only pair"
)
UNITS = _words(
    "mm cm m km inch inche foot feet yard mile meter metre kilometer kilometre mg g kg gram kilogram ton tonne ounce "
    "oz pound lb lbs ml l liter litre gallon cup tablespoon teaspoon s ms ns us sec minute min hour hr h day week "
    "month year decade century byte kb mb gb tb kib mib gib bit hz khz mhz ghz w kw kwh v volt watt amp celsius "
    "fahrenheit kelvin degree percent percentage usd eur gbp jpy chf dollar euro yen cent penny pence rupee franc "
    "today tomorrow yesterday monday tuesday wednesday thursday friday saturday sunday january february march april "
    "may june july august september october november december weekday weekend morning evening night noon midnight"
)
OPPOSITES = _words(
    "above absent accept accurate active add after allow always ancient answer approve arrive ascend asleep attach "
    "awake backward bad before begin below best better big block borrow bottom buy cancel cause cheap child clockwise "
    "close cold connect create credit cure customer debit decline decode decrease decrypt deep delete deny deposit "
    "descend destroy detach different disable disconnect down download dry early east employee employer empty enable "
    "encode encrypt end enter even exclude exit expand expensive export external fake fall false fast fat female "
    "final find finish forward free freeze from full future gain give good grow happy hard hate heavy hide high hire "
    "hot import in include incoming increase inside install internal into keep large late leave left legal lend less "
    "light little lock long lose loss loud love low male maximum max minimum min modern more most negative new next "
    "north odd off old on open out outgoing outside over pass past paid pay plus minus poor positive previous private "
    "profit public pull push quick quiet raise real receive reject remove rich right rise rough sad safe same save "
    "sell send short show shrink sick similar simple slow small smooth soft south spend start strong success sunrise "
    "sunset synchronous asynchronous tall teacher student thick thin tight to top true under unfreeze uninstall "
    "unlock until up upload vertical horizontal weak wealthy west win withdraw withdrawal wet wide narrow with worse "
    "worst wrong young illegal possible impossible valid invalid correct incorrect known unknown"
)
LIGHT = _words(
    "a an the of and or but is are was were be been being am do does did have has had can could will would shall "
    "should might must i me my mine you your yours he him his she her hers it its we us our ours they them their "
    "theirs this that these those there here what which how please kindly thanks thank hello hi hey so just also then "
    "than as at by for about if tell explain describe define give let know want need like get got make help say mean "
    "concept idea question really very actually now ok okay well lot bit too"
)
OPENERS = LIGHT | _words(
    "is are who where when why whose whom whats hows im ive id if in on at after before since while during to from "
    "with without not no yes some any every each all both one two once there write list show find compare name "
    "summarize summarise translate create build calculate compute convert discuss analyze analyse suggest recommend "
    "provide identify outline prove solve state draw design implement generate imagine suppose assume consider given "
    "use using explain under over more most many much another other my our your their his her its someone something "
    "whenever wherever although because however recently today yesterday tomorrow last next first new good best"
)

"""English words that name a task, by the kind of answer that they ask for.

What is known about a word before any answer: that `essay` and `story` are alike, as are `classify` and `identify`. The
learner gets the kinds as further features, and learns itself which kinds have long answers. Without them it has to see
every word first. The lists are from general knowledge, not from data; other words and other languages lack this help
only.
"""

_WORDS_OF = {
    "text": "essay story stories article blog post letter speech script dialogue dialog conversation poem poems "
    "song songs report plan guide tutorial paragraph paragraphs proposal email scene monologue narrative "
    "biography lyrics",
    "write": "write compose create generate craft draft develop design build construct produce make",
    "explain": "explain describe discuss elaborate analyze analyse compare contrast summarize summarise outline "
    "evaluate argue explanation description analysis comparison summary why how",
    "choose": "classify identify categorize categorise select choose determine decide detect label which yes no "
    "true false correct sentiment positive negative",
    "edit": "rewrite edit paraphrase translate convert change replace reword fix transform rephrase reorder sort "
    "arrange rearrange modify revise unscramble insert add remove combine",
    "short": "name word words title headline slogan tagline synonym synonyms antonym antonyms phrase capital date "
    "one single short brief briefly concise sentence sentences term acronym",
    "list": "list give suggest brainstorm ideas examples ways steps tips reasons benefits two three four five six "
    "seven ten several items bullet points advantages disadvantages",
    "calculate": "calculate compute solve sum average equation number numbers probability percent area perimeter",
    "code": "code program function class method python java javascript typescript html css sql query algorithm "
    "bash rust c regex",
    "ask": "what who when where is are does do did can",
    "play": "you act imagine pretend character role play roleplay",
}
TASK_OF = {word: task for task, words in _WORDS_OF.items() for word in words.split()}

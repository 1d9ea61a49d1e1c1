"""What only Portuguese says or writes. It is said as in Brazil: dezenove, um bilhão."""

from spoken_text.romance import Romance
from spoken_text.rule import Rules


class Language(Romance):
    def holds_noun(self, word: str, held: str) -> bool:
        return word == "em"

    def is_open(self, value: str, noun: str, said: str) -> bool:
        return value == "1" and noun.endswith("a")

    def end(self, rule: Rules) -> None:
        self.iberian(rule)
        postal = r"(?<![\w.,:/-])\d{4}-\d{3}(?!\w|[.,-])"
        rule("-", postal, lambda f: self.dialled(f) if f.after[:1].isupper() else None)

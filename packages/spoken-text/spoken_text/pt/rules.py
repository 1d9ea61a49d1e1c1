"""What only Portuguese says or writes. It is said as in Brazil: dezenove, um bilhão."""

from spoken_text.romance import Romance
from spoken_text.rule import Found, Rules


class Language(Romance):
    def holds_noun(self, word: str, held: str) -> bool:
        return word == "em"

    def is_open(self, value: str, noun: str, said: str) -> bool:
        return value == "1" and noun.endswith("a")

    def end(self, rule: Rules) -> None:
        self.iberian(rule)
        rule("-", r"(?<![\w.,:/-])\d{4}-\d{3}(?!\w|[.,-])", self._postal)

    def _postal(self, found: Found) -> str | None:
        return self.dialled(found[0]) if found.after[:1].isupper() else None

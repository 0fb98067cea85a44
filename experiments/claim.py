"""What a claim is: the words, what is measured, and the rule that decides."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Verdict = Literal["holds", "holds with a condition", "does not hold"]
HOLDS, CONDITION, FAILS = VERDICTS = ("holds", "holds with a condition", "does not hold")
KOREAN = {HOLDS: "성립", CONDITION: "조건부 성립", FAILS: "성립하지 않음"}

Numbers = dict[str, float | int | str | list | dict]  # plain data, as JSON keeps it: every key is a string


class Claim(ABC):
    """One documented claim. `measure` takes the time; the others are functions of the numbers alone."""

    id: ClassVar[str]
    english: ClassVar[str]
    """The claim in one sentence."""
    korean: ClassVar[str]
    prediction: ClassVar[str]
    """What will be seen if the claim is right, and how it is measured."""
    rule: ClassVar[str]
    """What `verdict` computes, in words, with its thresholds."""
    changed: ClassVar[str] = ""
    """How experiment or rule came to differ from what was first written, or numbers were known before it; and the
    verdict before, where it is known."""
    first_verdict: ClassVar[Verdict | None] = None
    """The verdict before it was `changed`, where that was another one."""

    @abstractmethod
    def measure(self) -> Numbers: ...

    @abstractmethod
    def verdict(self, numbers: Numbers) -> Verdict: ...

    @abstractmethod
    def finding(self, numbers: Numbers) -> str:
        """What was found, in a few sentences with numbers; where the claim is imprecise, how to say it better."""

    @abstractmethod
    def table(self, numbers: Numbers) -> list[list[str]]:
        """The numbers for people: a heading, then rows."""

    @abstractmethod
    def draw(self, numbers: Numbers, figure: "Figure") -> None:
        """A picture that is understood without the text: titles, axes with units, a legend; English labels."""

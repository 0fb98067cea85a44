"""What a claim is: the words, what is measured, and the rule that decides, written before the measurement."""

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
    """What of experiment or rule was changed after numbers had been seen, and what it would have said before."""

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

"""Where boxes are, as far as markets say, and how far two of them are from each other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

_COUNTRY: Final = re.compile(r"(?:^|[,\s])([A-Z]{2})$")

_CONTINENTS: Final = {
    "North America": "US CA MX CR PA GT DO PR",
    "South America": "BR AR CL CO PE UY EC PY BO VE",
    "Europe": "AT BE BG CH CY CZ DE DK EE ES FI FR GB GR HR HU IE IS IT LT LU LV MD ME MK MT NL NO PL PT RO RS RU SE "
    "SI SK UA UK BY AL BA",
    "Asia": "AE AM AZ BH CN GE HK ID IL IN IQ IR JO JP KG KH KR KW KZ LA LB LK MN MO MY NP OM PH PK QA SA SG TH TR TW "
    "UZ VN",
    "Africa": "DZ EG ET GH KE MA MU NG RW SN TN TZ UG ZA",
    "Oceania": "AU NZ",
}
_CONTINENT_OF: Final = {country: name for name, countries in _CONTINENTS.items() for country in countries.split()}


class Distance(Enum):
    """How far two boxes are from each other, by what is known of their places."""

    SITE = "in one data centre"
    COUNTRY = "in one country"
    CONTINENT = "on one continent"
    WORLD = "on two continents"
    UNKNOWN = "at places that are not known"


@dataclass(frozen=True, slots=True)
class Location:
    """Where a box is: `text` as the market says it, `country` as two letters, `site` a name that
    boxes in one building share. Empty where nothing is said."""

    text: str = ""
    country: str = ""
    site: str = ""

    @property
    def continent(self) -> str:
        """Empty where the country is not known."""
        return _CONTINENT_OF.get(self.country, "")


def parse_place(text: str | None, site: str = "") -> Location:
    """From texts like `Texas, US`, `Sweden, SE` or `US`."""
    told = " ".join((text or "").split())
    found = _COUNTRY.search(told)
    return Location(told, found[1] if found else "", site)


def distance(one: Location, other: Location) -> Distance:
    """By the nearest that both share. Large countries are one country."""
    if one.site and one.site == other.site:
        return Distance.SITE
    if not (one.country and other.country):
        return Distance.UNKNOWN
    if one.country == other.country:
        return Distance.COUNTRY
    if not (one.continent and other.continent):
        return Distance.UNKNOWN
    return Distance.CONTINENT if one.continent == other.continent else Distance.WORLD

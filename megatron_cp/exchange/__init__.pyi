from .exchange import Exchange as Exchange
from .sections import Section as Section
from .sections import Sections as Sections

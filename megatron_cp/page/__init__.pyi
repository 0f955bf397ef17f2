from .colours import DISTINCT as DISTINCT
from .colours import distinct_colours as distinct_colours
from .page import check_charts as check_charts
from .page import check_page as check_page
from .page import page_of as page_of
from .page import save_page as save_page
from .page import spans_of as spans_of

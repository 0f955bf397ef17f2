"""A predicted training step as one HTML page: `page` joins it, `fields` refuses bad reports, `columns` packs numbers.

The page is one file that asks the network for nothing. `page.html`, `page.css` and the scripts are its parts.
"""

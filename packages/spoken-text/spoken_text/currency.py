"""The signs and codes of currencies. Their names are in the languages' folders."""

SIGNS = {
    "$": "USD", "US$": "USD", "A$": "AUD", "AU$": "AUD", "C$": "CAD", "CA$": "CAD", "HK$": "HKD", "NZ$": "NZD",
    "S$": "SGD", "NT$": "TWD", "CN¥": "CNY", "MX$": "MXN", "R$": "BRL", "€": "EUR", "£": "GBP", "¥": "JPY", "￥": "JPY",
    "₽": "RUB", "₩": "KRW", "₹": "INR", "₺": "TRY", "₴": "UAH", "zł": "PLN", "Kč": "CZK", "kr": "SEK", "Fr.": "CHF",
    "руб": "RUB", "руб.": "RUB", "р": "RUB", "р.": "RUB", "долл": "USD", "долл.": "USD",
}  # fmt: skip
CODES = "USD EUR GBP JPY CHF RUB KRW INR CNY AUD CAD HKD NZD SGD TWD MXN BRL PLN CZK SEK NOK DKK TRY UAH".split()

SIGN = r"(?:US|AU?|CA?|HK|NZ|NT|S|MX|R)\$|CN¥|[$€£¥￥₽₩₹₺₴]"
SIGN_BEHIND = r"zł|Kč|kr\b\.?|руб\b\.?|р\b\.?|долл\b\.?"
"""These stand only behind an amount."""

CODE = "|".join(CODES)
INITIALS = "".join({name[0] for name in [*SIGNS, *CODES]})

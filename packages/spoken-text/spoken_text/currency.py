"""Currencies: their signs, and the names that num2words lacks or gets wrong."""

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

_NAMES = {
    "en": "GBP pound pounds penny pence, AUD Australian_dollar Australian_dollars cent cents, CAD Canadian_dollar "
    "Canadian_dollars cent cents, HKD Hong_Kong_dollar Hong_Kong_dollars cent cents, NZD New_Zealand_dollar "
    "New_Zealand_dollars cent cents, SGD Singapore_dollar Singapore_dollars cent cents, TWD Taiwan_dollar "
    "Taiwan_dollars cent cents, BRL real reais centavo centavos, CHF Swiss_franc Swiss_francs centime centimes, KRW "
    "won won, JPY yen yen, CNY yuan yuan, PLN zloty zlotys grosz groszy, CZK koruna korunas heller hellers, DKK "
    "krone kroner øre øre, TRY lira lira kuruş kuruş, UAH hryvnia hryvnias kopiyka kopiykas, RUB ruble rubles kopek "
    "kopeks",
    "de": "AUD australischer_Dollar australische_Dollar Cent Cent, CAD kanadischer_Dollar kanadische_Dollar Cent "
    "Cent, HKD Hongkong-Dollar Hongkong-Dollar Cent Cent, NZD Neuseeland-Dollar Neuseeland-Dollar Cent Cent, SGD "
    "Singapur-Dollar Singapur-Dollar Cent Cent, TWD Taiwan-Dollar Taiwan-Dollar Cent Cent, BRL Real Reais Centavo "
    "Centavos, CHF Franken Franken Rappen Rappen, JPY Yen Yen, PLN Zloty Zloty Groszy Groszy, CZK f Krone Kronen "
    "Heller Heller, SEK f Krone Kronen Öre Öre, NOK f Krone Kronen Öre Öre, DKK f Krone Kronen Öre Öre, TRY f Lira "
    "Lira Kuruş Kuruş, INR f Rupie Rupien Paisa Paisa, RUB Rubel Rubel Kopeke Kopeken, MXN Peso Pesos Centavo "
    "Centavos",
    "fr": "GBP f livre livres penny pence, AUD dollar_australien dollars_australiens cent cents, CAD dollar_canadien "
    "dollars_canadiens cent cents, HKD dollar_de_Hong_Kong dollars_de_Hong_Kong cent cents, NZD dollar_néo-zélandais "
    "dollars_néo-zélandais cent cents, BRL real reais centavo centavos, CHF franc_suisse francs_suisses centime "
    "centimes, JPY yen yens, KRW won wons, PLN zloty zlotys grosz groszy, CZK f couronne couronnes heller hellers, "
    "SEK f couronne couronnes öre öre, NOK f couronne couronnes øre øre, DKK f couronne couronnes øre øre, INR f "
    "roupie roupies paisa paisas, RUB rouble roubles kopeck kopecks, MXN peso pesos centavo centavos, TRY f "
    "livre_turque livres_turques kuruş kuruş",
    "es": "AUD dólar_australiano dólares_australianos centavo centavos, CAD dólar_canadiense dólares_canadienses "
    "centavo centavos, HKD dólar_de_Hong_Kong dólares_de_Hong_Kong centavo centavos, CHF franco_suizo francos_suizos "
    "céntimo céntimos, BRL real reales centavo centavos",
    "it": "GBP f sterlina sterline penny pence, AUD dollaro_australiano dollari_australiani centesimo centesimi, CAD "
    "dollaro_canadese dollari_canadesi centesimo centesimi, HKD dollaro_di_Hong_Kong dollari_di_Hong_Kong centesimo "
    "centesimi, BRL real reais centavo centavos, CHF franco_svizzero franchi_svizzeri centesimo centesimi, JPY yen "
    "yen, KRW won won, PLN zloty zloty grosz grosz, CZK f corona corone haléř haléř, SEK f corona corone öre öre, "
    "NOK f corona corone øre øre, DKK f corona corone øre øre, INR f rupia rupie paisa paisa, RUB rublo rubli copeco "
    "copechi, MXN peso pesos centavo centavos",
    "pt": "EUR euro euros centavo centavos, "
    "USD dólar dólares centavo centavos, GBP f libra libras pence pence, BRL real reais centavo centavos, AUD "
    "dólar_australiano dólares_australianos centavo centavos, CAD dólar_canadense dólares_canadenses centavo "
    "centavos, HKD dólar_de_Hong_Kong dólares_de_Hong_Kong centavo centavos, CHF franco_suíço francos_suíços centavo "
    "centavos, JPY iene ienes, KRW won wons, CNY yuan yuans, PLN zloty zlotys grosz groszy, SEK f coroa coroas öre "
    "öre, NOK f coroa coroas øre øre, DKK f coroa coroas øre øre, CZK f coroa coroas haléř haléř, INR f rupia rupias "
    "paisa paisas, RUB rublo rublos copeque copeques, MXN peso pesos centavo centavos",
    "ru": "GBP фунт фунта фунтов пенс пенса пенсов, JPY f иена иены иен, CNY юань юаня юаней, CHF франк франка "
    "франков сантим сантима сантимов, KRW f вона воны вон, BRL реал реала реалов сентаво сентаво сентаво, PLN злотый "
    "злотых злотых грош гроша грошей, AUD австралийский_доллар австралийских_доллара австралийских_долларов цент "
    "цента центов, CAD канадский_доллар канадских_доллара канадских_долларов цент цента центов, HKD "
    "гонконгский_доллар гонконгских_доллара гонконгских_долларов цент цента центов, SEK f крона кроны крон эре эре "
    "эре, NOK f крона кроны крон эре эре эре, DKK f крона кроны крон эре эре эре, CZK f крона кроны крон геллер "
    "геллера геллеров, UAH f гривна гривны гривен копейка копейки копеек, INR f рупия рупии рупий, TRY f лира лиры "
    "лир",
    "zh": "USD 美元, EUR 欧元, GBP 英镑, JPY 元, CNY 元, RUB 卢布, KRW 韩元, CHF 瑞士法郎, AUD 澳元, CAD 加元, HKD "
    "港元, NZD 新西兰元, SGD 新加坡元, TWD 新台币, BRL 雷亚尔, INR 卢比, PLN 兹罗提, MXN 比索, TRY 里拉, SEK "
    "瑞典克朗, NOK 挪威克朗, DKK 丹麦克朗",
    "ja": "USD ドル, EUR ユーロ, GBP ポンド, JPY 円, CNY 元, KRW ウォン, CHF スイスフラン, AUD オーストラリアドル, "
    "CAD カナダドル, HKD 香港ドル, NZD ニュージーランドドル, SGD シンガポールドル, TWD 台湾ドル, BRL レアル, INR "
    "ルピー, RUB ルーブル",
    "ko": "USD 달러, EUR 유로, GBP 파운드, JPY 엔, CNY 위안, KRW 원, CHF 스위스_프랑, AUD 호주_달러, CAD "
    "캐나다_달러, HKD 홍콩_달러, NZD 뉴질랜드_달러, SGD 싱가포르_달러, TWD 대만_달러, BRL 헤알, INR 루피, RUB 루블",
}
"""Forms of the currency, then of its hundredth; Russian has three of each. "f" marks a feminine currency."""


def _names_of(code: str) -> dict[str, tuple[str, ...]]:
    rows = (row.split() for row in _NAMES[code].split(", "))
    return {row[0]: tuple(word.replace("_", " ") for word in row[1:]) for row in rows}


NAMES = {code: _names_of(code) for code in _NAMES}

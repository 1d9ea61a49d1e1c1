"""Names of units, "%", and currencies that num2words lacks, in each language."""

_UNITS = {
    "english": "km kilometer kilometers, m meter meters, cm centimeter centimeters, mm millimeter millimeters, "
    "km/h kilometer_per_hour kilometers_per_hour, mph mile_per_hour miles_per_hour, mi mile miles, ft foot feet, "
    "lb pound pounds, lbs pound pounds, oz ounce ounces, kg kilogram kilograms, g gram grams, mg milligram milligrams, "
    "l liter liters, L liter liters, ml milliliter milliliters, °C degree_Celsius degrees_Celsius, "
    "°F degree_Fahrenheit degrees_Fahrenheit, ° degree degrees, h hour hours, min minute minutes, s second seconds, "
    "ms millisecond milliseconds, GB gigabyte gigabytes, MB megabyte megabytes, kB kilobyte kilobytes, "
    "KB kilobyte kilobytes, TB terabyte terabytes, W watt watts, kW kilowatt kilowatts, kWh kilowatt_hour "
    "kilowatt_hours, V volt volts, Hz hertz hertz, kHz kilohertz kilohertz, MHz megahertz megahertz, GHz gigahertz "
    "gigahertz, m² square_meter square_meters, km² square_kilometer square_kilometers, % percent percent, "
    "JPY yen yen, CNY yuan yuan",
    "german": "km Kilometer Kilometer, m Meter Meter, cm Zentimeter Zentimeter, mm Millimeter Millimeter, "
    "km/h Kilometer_pro_Stunde Kilometer_pro_Stunde, kg Kilogramm Kilogramm, g Gramm Gramm, mg Milligramm Milligramm, "
    "l Liter Liter, ml Milliliter Milliliter, °C Grad_Celsius Grad_Celsius, °F Grad_Fahrenheit Grad_Fahrenheit, "
    "° Grad Grad, h Stunde Stunden f, Std Stunde Stunden f, min Minute Minuten f, s Sekunde Sekunden f, "
    "ms Millisekunde Millisekunden f, GB Gigabyte Gigabyte, MB Megabyte Megabyte, kB Kilobyte Kilobyte, "
    "KB Kilobyte Kilobyte, TB Terabyte Terabyte, W Watt Watt, kW Kilowatt Kilowatt, kWh Kilowattstunde "
    "Kilowattstunden f, V Volt Volt, Hz Hertz Hertz, kHz Kilohertz Kilohertz, MHz Megahertz Megahertz, GHz Gigahertz "
    "Gigahertz, m² Quadratmeter Quadratmeter, km² Quadratkilometer Quadratkilometer, % Prozent Prozent, "
    "JPY Yen Yen, CHF Franken Franken",
    "french": "km kilomètre kilomètres, m mètre mètres, cm centimètre centimètres, mm millimètre millimètres, "
    "km/h kilomètre_par_heure kilomètres_par_heure, kg kilogramme kilogrammes, g gramme grammes, "
    "mg milligramme milligrammes, l litre litres, ml millilitre millilitres, °C degré_Celsius degrés_Celsius, "
    "°F degré_Fahrenheit degrés_Fahrenheit, ° degré degrés, h heure heures f, min minute minutes f, s seconde secondes "
    "f, ms milliseconde millisecondes f, Go gigaoctet gigaoctets, Mo mégaoctet mégaoctets, ko kilooctet kilooctets, "
    "GB gigaoctet gigaoctets, MB mégaoctet mégaoctets, TB téraoctet téraoctets, W watt watts, kW kilowatt kilowatts, "
    "kWh kilowattheure kilowattheures, V volt volts, Hz hertz hertz, kHz kilohertz kilohertz, MHz mégahertz mégahertz, "
    "GHz gigahertz gigahertz, m² mètre_carré mètres_carrés, km² kilomètre_carré kilomètres_carrés, "
    "% pour_cent pour_cent, JPY yen yens, GBP livre livres f, CHF franc_suisse francs_suisses",
    "spanish": "km kilómetro kilómetros, m metro metros, cm centímetro centímetros, mm milímetro milímetros, "
    "km/h kilómetro_por_hora kilómetros_por_hora, kg kilogramo kilogramos, g gramo gramos, mg miligramo miligramos, "
    "l litro litros, ml mililitro mililitros, °C grado_Celsius grados_Celsius, °F grado_Fahrenheit grados_Fahrenheit, "
    "° grado grados, h hora horas f, min minuto minutos, s segundo segundos, ms milisegundo milisegundos, "
    "GB gigabyte gigabytes, MB megabyte megabytes, kB kilobyte kilobytes, TB terabyte terabytes, "
    "W vatio vatios, kW kilovatio kilovatios, kWh kilovatio_hora kilovatios_hora, V voltio voltios, Hz hercio hercios, "
    "kHz kilohercio kilohercios, MHz megahercio megahercios, GHz gigahercio gigahercios, "
    "m² metro_cuadrado metros_cuadrados, km² kilómetro_cuadrado kilómetros_cuadrados, % por_ciento por_ciento",
    "italian": "km chilometro chilometri, m metro metri, cm centimetro centimetri, mm millimetro millimetri, "
    "km/h chilometro_all'ora chilometri_all'ora, kg chilogrammo chilogrammi, g grammo grammi, l litro litri, "
    "ml millilitro millilitri, °C grado_Celsius gradi_Celsius, ° grado gradi, h ora ore f, min minuto minuti, "
    "s secondo secondi, GB gigabyte gigabyte, MB megabyte megabyte, m² metro_quadrato metri_quadrati, "
    "% per_cento per_cento, JPY yen yen, CHF franco_svizzero franchi_svizzeri",
    "portuguese": "km quilómetro quilómetros, m metro metros, cm centímetro centímetros, mm milímetro milímetros, "
    "km/h quilómetro_por_hora quilómetros_por_hora, kg quilograma quilogramas, g grama gramas, l litro litros, "
    "ml mililitro mililitros, °C grau_Celsius graus_Celsius, ° grau graus, h hora horas f, min minuto minutos, "
    "s segundo segundos, GB gigabyte gigabytes, MB megabyte megabytes, m² metro_quadrado metros_quadrados, "
    "% por_cento por_cento, GBP libra libras f, JPY iene ienes",
    "russian": "км километр километра километров, м метр метра метров, см сантиметр сантиметра сантиметров, "
    "мм миллиметр миллиметра миллиметров, кг килограмм килограмма килограммов, г грамм грамма граммов, "
    "л литр литра литров, км/ч километр_в_час километра_в_час километров_в_час, °C градус_Цельсия градуса_Цельсия "
    "градусов_Цельсия, ° градус градуса градусов, ч час часа часов, мин минута минуты минут f, сек секунда секунды "
    "секунд f, % процент процента процентов, GBP фунт фунта фунтов, JPY иена иены иен f, CNY юань юаня юаней",
    "chinese": "km 公里, m 米, cm 厘米, mm 毫米, km/h 公里每小时, kg 公斤, g 克, l 升, ml 毫升, °C 摄氏度, ° 度, "
    "h 小时, min 分钟, s 秒"
    ", % 百分之{}, USD 美元, EUR 欧元, GBP 英镑, JPY 元, CNY 元, RUB 卢布, KRW 韩元, CHF 瑞士法郎",
    "japanese": "km キロメートル, m メートル, cm センチメートル, mm ミリメートル, "
    "km/h キロ毎時, kg キログラム, g グラム, l リットル, "
    "ml ミリリットル, °C 度, ° 度, h 時間, min 分, s 秒, "
    "% パーセント, USD ドル, EUR ユーロ, GBP ポンド, "
    "JPY 円, CNY 元, KRW ウォン, CHF スイスフラン",
    "korean": "km 킬로미터, m 미터, cm 센티미터, mm 밀리미터, kg 킬로그램, g 그램, l 리터, ml 밀리리터, °C 도, ° 도, "
    "% 퍼센트, USD 달러, EUR 유로, GBP 파운드, JPY 엔, CNY 위안, KRW 원, CHF 스위스_프랑",
}
"""By language: a written form, then its spoken forms. Two forms are singular and plural; Russian has three. "f" after
them marks a feminine noun, in languages where that changes the number. "_" stands for a blank. "{}" stands for the
number if it comes after a word. "L" and "KB" are other ways to write a unit."""


def units_of(language: str) -> dict[str, tuple[str, ...]]:
    """Written form -> spoken forms, from the table."""
    rows = (row.split() for row in _UNITS[language].split(", "))
    return {row[0]: tuple(word.replace("_", " ") for word in row[1:]) for row in rows}

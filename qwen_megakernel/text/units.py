"""Units: a written form, and how each language says it."""

_ROWS = {
    "english": "km kilometer kilometers, m meter meters, cm centimeter centimeters, mm millimeter millimeters, km/h "
    "kilometer_per_hour kilometers_per_hour, mph mile_per_hour miles_per_hour, mi mile miles, ft foot feet, lb pound "
    "pounds, lbs pound pounds, oz ounce ounces, kg kilogram kilograms, g gram grams, mg milligram milligrams, l liter "
    "liters, L liter liters, ml milliliter milliliters, °C degree_Celsius degrees_Celsius, °F degree_Fahrenheit "
    "degrees_Fahrenheit, ° degree degrees, h hour hours, hr hour hours, hrs hour hours, min minute minutes, mins "
    "minute minutes, s second seconds, sec second seconds, secs second seconds, m/s meter_per_second "
    "meters_per_second, ms millisecond milliseconds, GB gigabyte gigabytes, MB megabyte megabytes, kB kilobyte "
    "kilobytes, KB kilobyte kilobytes, TB terabyte terabytes, W watt watts, kW kilowatt kilowatts, kWh kilowatt_hour "
    "kilowatt_hours, V volt volts, Hz hertz hertz, kHz kilohertz kilohertz, MHz megahertz megahertz, GHz gigahertz "
    "gigahertz, m² square_meter square_meters, km² square_kilometer square_kilometers, m/s² meter_per_second_squared "
    "meters_per_second_squared, m³ cubic_meter cubic_meters, cm³ cubic_centimeter cubic_centimeters, ft² square_foot "
    "square_feet, mL milliliter milliliters, dL deciliter deciliters, µm micrometer micrometers, μm micrometer "
    "micrometers, nm nanometer nanometers, µg microgram micrograms, μg microgram micrograms, mcg microgram "
    "micrograms, tsp teaspoon teaspoons, tbsp tablespoon tablespoons, yd yard yards, yds yard yards, qt quart quarts, "
    "gal gallon gallons, kcal kilocalorie kilocalories, MW megawatt megawatts, GW gigawatt gigawatts, MWh "
    "megawatt_hour megawatt_hours, GWh gigawatt_hour gigawatt_hours, Wh watt_hour watt_hours, mAh milliamp_hour "
    "milliamp_hours, dB decibel decibels, kPa kilopascal kilopascals, hPa hectopascal hectopascals, Mbps "
    "megabit_per_second megabits_per_second, mbps megabit_per_second megabits_per_second, Gbps gigabit_per_second "
    "gigabits_per_second, kbps kilobit_per_second kilobits_per_second, kph kilometer_per_hour kilometers_per_hour, "
    "rpm revolution_per_minute revolutions_per_minute, fps frame_per_second frames_per_second, mmHg "
    "millimeter_of_mercury millimeters_of_mercury, % percent percent",
    "german": "km Kilometer Kilometer, m Meter Meter, cm Zentimeter Zentimeter, mm Millimeter Millimeter, km/h "
    "Kilometer_pro_Stunde Kilometer_pro_Stunde, kg Kilogramm Kilogramm, g Gramm Gramm, mg Milligramm Milligramm, l "
    "Liter Liter, ml Milliliter Milliliter, °C Grad_Celsius Grad_Celsius, °F Grad_Fahrenheit Grad_Fahrenheit, ° Grad "
    "Grad, h Stunde Stunden f, Std Stunde Stunden f, min Minute Minuten f, Min Minute Minuten f, s Sekunde Sekunden "
    "f, Sek Sekunde Sekunden f, ms Millisekunde Millisekunden f, GB Gigabyte Gigabyte, MB Megabyte Megabyte, kB "
    "Kilobyte Kilobyte, KB Kilobyte Kilobyte, TB Terabyte Terabyte, W Watt Watt, kW Kilowatt Kilowatt, kWh "
    "Kilowattstunde Kilowattstunden f, V Volt Volt, Hz Hertz Hertz, kHz Kilohertz Kilohertz, MHz Megahertz Megahertz, "
    "GHz Gigahertz Gigahertz, m² Quadratmeter Quadratmeter, km² Quadratkilometer Quadratkilometer, cm² "
    "Quadratzentimeter Quadratzentimeter, m³ Kubikmeter Kubikmeter, cm³ Kubikzentimeter Kubikzentimeter, m/s "
    "Meter_pro_Sekunde Meter_pro_Sekunde, m/s² Meter_pro_Quadratsekunde Meter_pro_Quadratsekunde, µm Mikrometer "
    "Mikrometer, μm Mikrometer Mikrometer, nm Nanometer Nanometer, µg Mikrogramm Mikrogramm, cl Zentiliter "
    "Zentiliter, dl Deziliter Deziliter, EL Esslöffel Esslöffel, TL Teelöffel Teelöffel, Pck Päckchen Päckchen, ha "
    "Hektar Hektar, kcal Kilokalorie Kilokalorien f, kJ Kilojoule Kilojoule, Wh Wattstunde Wattstunden f, MW Megawatt "
    "Megawatt, GW Gigawatt Gigawatt, MWh Megawattstunde Megawattstunden f, dB Dezibel Dezibel, hPa Hektopascal "
    "Hektopascal, Mbit/s Megabit_pro_Sekunde Megabit_pro_Sekunde, ct Cent Cent, % Prozent Prozent",
    "french": "km kilomètre kilomètres, m mètre mètres, cm centimètre centimètres, mm millimètre millimètres, "
    "km/h kilomètre_par_heure kilomètres_par_heure, kg kilogramme kilogrammes, g gramme grammes, "
    "mg milligramme milligrammes, l litre litres, L litre litres, ml millilitre millilitres, °C degré_Celsius "
    "degrés_Celsius, "
    "°F degré_Fahrenheit degrés_Fahrenheit, ° degré degrés, h heure heures f, min minute minutes f, s seconde secondes "
    "f, ms milliseconde millisecondes f, Go gigaoctet gigaoctets, Mo mégaoctet mégaoctets, ko kilooctet kilooctets, "
    "GB gigaoctet gigaoctets, MB mégaoctet mégaoctets, TB téraoctet téraoctets, W watt watts, kW kilowatt kilowatts, "
    "kWh kilowattheure kilowattheures, V volt volts, Hz hertz hertz, kHz kilohertz kilohertz, MHz mégahertz mégahertz, "
    "GHz gigahertz gigahertz, m² mètre_carré mètres_carrés, km² kilomètre_carré kilomètres_carrés, "
    "cl centilitre centilitres, dl décilitre décilitres, m³ mètre_cube mètres_cubes, ha hectare hectares, "
    "% pour_cent pour_cent",
    "spanish": "km kilómetro kilómetros, m metro metros, cm centímetro centímetros, mm milímetro milímetros, "
    "km/h kilómetro_por_hora kilómetros_por_hora, kg kilogramo kilogramos, g gramo gramos, mg miligramo miligramos, "
    "l litro litros, L litro litros, ml mililitro mililitros, °C grado_Celsius grados_Celsius, °F grado_Fahrenheit "
    "grados_Fahrenheit, "
    "mph milla_por_hora millas_por_hora f, ° grado grados, h hora horas f, min minuto minutos, s segundo segundos, "
    "ms milisegundo milisegundos, "
    "GB gigabyte gigabytes, MB megabyte megabytes, kB kilobyte kilobytes, TB terabyte terabytes, "
    "W vatio vatios, kW kilovatio kilovatios, kWh kilovatio_hora kilovatios_hora, V voltio voltios, Hz hercio hercios, "
    "kHz kilohercio kilohercios, MHz megahercio megahercios, GHz gigahercio gigahercios, "
    "cl centilitro centilitros, m³ metro_cúbico metros_cúbicos, ha hectárea hectáreas f, "
    "m² metro_cuadrado metros_cuadrados, km² kilómetro_cuadrado kilómetros_cuadrados, % por_ciento por_ciento",
    "italian": "km chilometro chilometri, m metro metri, cm centimetro centimetri, mm millimetro millimetri, "
    "km/h chilometro_all'ora chilometri_all'ora, kg chilogrammo chilogrammi, g grammo grammi, l litro litri, L litro "
    "litri, "
    "ml millilitro millilitri, °C grado_Celsius gradi_Celsius, ° grado gradi, h ora ore f, min minuto minuti, "
    "s secondo secondi, sec secondo secondi, GB gigabyte gigabyte, MB megabyte megabyte, TB terabyte terabyte, "
    "m² metro_quadrato metri_quadrati, mq metro_quadrato metri_quadrati, km² chilometro_quadrato chilometri_quadrati, "
    "m³ metro_cubo metri_cubi, mg milligrammo milligrammi, cl centilitro centilitri, dl decilitro decilitri, "
    "ha ettaro ettari, W watt watt, kW kilowatt kilowatt, kWh kilowattora kilowattora, V volt volt, Hz hertz hertz, "
    "MHz megahertz megahertz, GHz gigahertz gigahertz, ms millisecondo millisecondi, "
    "% per_cento per_cento",
    "portuguese": "km quilómetro quilómetros, m metro metros, cm centímetro centímetros, mm milímetro milímetros, "
    "km/h quilómetro_por_hora quilómetros_por_hora, kg quilograma quilogramas, g grama gramas, l litro litros, L "
    "litro litros, "
    "ml mililitro mililitros, °C grau_Celsius graus_Celsius, ° grau graus, h hora horas f, min minuto minutos, "
    "s segundo segundos, GB gigabyte gigabytes, MB megabyte megabytes, TB terabyte terabytes, "
    "m² metro_quadrado metros_quadrados, km² quilómetro_quadrado quilómetros_quadrados, "
    "m³ metro_cúbico metros_cúbicos, mg miligrama miligramas, cl centilitro centilitros, ha hectare hectares, "
    "W watt watts, kW quilowatt quilowatts, V volt volts, Hz hertz hertz, MHz megahertz megahertz, "
    "GHz gigahertz gigahertz, ms milissegundo milissegundos, "
    "% por_cento por_cento",
    "russian": "км километр километра километров, м метр метра метров, см сантиметр сантиметра сантиметров, мм "
    "миллиметр миллиметра миллиметров, кг килограмм килограмма килограммов, г грамм грамма граммов, л литр литра "
    "литров, гр грамм грамма граммов, м/с метр_в_секунду метра_в_секунду метров_в_секунду, км/ч километр_в_час "
    "километра_в_час километров_в_час, °C градус_Цельсия градуса_Цельсия градусов_Цельсия, ° градус градуса "
    "градусов, мл миллилитр миллилитра миллилитров, мг миллиграмм миллиграмма миллиграммов, т тонна тонны тонн f, га "
    "гектар гектара гектаров, Вт ватт ватта ватт, кВт киловатт киловатта киловатт, ГБ гигабайт гигабайта гигабайт, Гб "
    "гигабайт гигабайта гигабайт, МБ мегабайт мегабайта мегабайт, Мб мегабайт мегабайта мегабайт, м² "
    "квадратный_метр квадратных_метра квадратных_метров, км² квадратный_километр квадратных_километра "
    "квадратных_километров, м³ кубический_метр кубических_метра кубических_метров, коп копейка копейки копеек f, "
    "ч час часа часов, мин минута минуты минут f, сек секунда секунды секунд f, % процент процента "
    "процентов",
    "chinese": "km 公里, m 米, cm 厘米, mm 毫米, km/h 公里每小时, kg 公斤, g 克, l 升, ml 毫升, °C 摄氏度, ° 度, "
    "h 小时, min 分钟, s 秒"
    ", % 百分之{}",
    "japanese": "km キロメートル, m メートル, cm センチメートル, mm ミリメートル, "
    "km/h キロ毎時, kg キログラム, g グラム, l リットル, "
    "ml ミリリットル, °C 度, ° 度, h 時間, min 分, s 秒, "
    "% パーセント",
    "korean": "km 킬로미터, km/h 시속_{}_킬로미터, m 미터, cm 센티미터, mm 밀리미터, kg 킬로그램, g 그램, "
    "l 리터, ml 밀리리터, °C 도, ° 도, "
    "% 퍼센트",
}
"""By language: a written form, then its spoken forms. Two forms are singular and plural; Russian has three. "f" after
them marks a feminine noun, in languages where that changes the number. "_" stands for a blank. "{}" stands for the
number if it comes after a word. "L" and "KB" are other ways to write a unit."""


def _units_of(language: str) -> dict[str, tuple[str, ...]]:
    rows = (row.split() for row in _ROWS[language].split(", "))
    return {row[0]: tuple(word.replace("_", " ") for word in row[1:]) for row in rows}


UNITS = {language: _units_of(language) for language in _ROWS}

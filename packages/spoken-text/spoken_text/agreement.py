"""Numbers that agree with the noun behind them in French, Spanish, Italian and Portuguese: "1 persona" is
"una persona", "200 páginas" are "doscientas páginas". Where the noun's gender is not sure, the figure stays."""

import re
from dataclasses import dataclass

from spoken_text.rule import Around, keep

_WORD = re.compile(r"[a-zà-ÿœ'’-]+")


@dataclass(frozen=True)
class _Nouns:
    """What tells a noun's gender in one language. All words are singular; those behind "-" are no nouns."""

    feminine: frozenset[str]
    masculine: frozenset[str]
    feminine_ends: re.Pattern[str]  # of words in either number
    masculine_ends: re.Pattern[str]
    others: frozenset[str]  # words that are no nouns
    labels: frozenset[str]  # nouns before a number that is a name: "página 1"
    both: frozenset[str]  # adjectives of either gender, which may stand before the noun
    of: str = ""  # between a number of whole millions and its noun


def _nouns(feminine: str, masculine: str, ends: tuple[str, str], *rest: str) -> _Nouns:
    *words, of = rest
    others, labels, both = (frozenset(text.split()) for text in words)
    of_feminine, of_masculine = (re.compile(rf"(?:{end})$") for end in ends)
    known = frozenset(feminine.split()), frozenset(masculine.split())
    return _Nouns(*known, of_feminine, of_masculine, others, labels, both, of)


_NOUNS = {
    "es": _nouns(
        "cdta cda cucharadita persona hora semana vez página casa mujer cucharada cucharadita taza lata cebolla "
        "manzana copa botella caja "
        "bolsa mesa silla cama puerta ventana calle noche tarde mañana nube llave clave clase base frase fase parte "
        "fuente mente muerte suerte red pared sede señal cárcel piel serie especie superficie torre madre hija niña "
        "chica hermana amiga abuela tía señora imagen orden ley voz luz cruz raíz nariz paz flor labor sal miel mano "
        "foto moto radio web pyme imágen órden víctima nave llanta serpiente corriente sangre legumbre élite suite "
        "carne leche llave torre virgen crisis tesis dosis hipótesis síntesis sucursal catedral vocal credencial "
        "postal oveja gota pizca rebanada hoja rama zanahoria papa patata pera uva empresa palabra libra vida carta "
        "letra línea obra idea cosa pregunta respuesta prueba venta película canción novela tienda escuela carrera "
        "ciudad isla playa montaña lengua familia guerra batalla medalla moneda tonelada milla pulgada yarda hectárea "
        "década docena pareja planta habitación botella pastilla cápsula broma loma paloma goma crema yema gema suma "
        "fecha copia oferta cuenta tarea regla tabla lista nota pista rueda vuelta vaca gallina cabra rata "
        "tormenta estrella galaxia célula bacteria molécula neurona jornada etapa temporada llamada entrada salida "
        "cita queja causa multa deuda parada camiseta falda chaqueta pestaña ventaja plaza acción razón",
        "día año mes minuto segundo huevo diente euro dólar peso kilo gramo litro metro mapa planeta "
        "cometa atleta poeta pijama clima idioma tema problema sistema programa síntoma drama fantasma dilema hombre "
        "niño chico hermano amigo hijo padre señor dálmata libro coche auto perro gato vaso plato punto gol partido "
        "equipo "
        "voto país lugar papel árbol color valor error motor sofá café té pez juez lápiz mes interés examen joven "
        "volumen crimen origen virus lunes martes miércoles jueves viernes análisis gas bus tren plan pan fin "
        "millón billón trimestre semestre siglo momento rato grado kilómetro centímetro trabajo empleo caso millar "
        "diez paréntesis tomate ajo limón pimiento aguacate cuarto tercio corazón policía guardia colega camarada "
        "correo mensaje archivo usuario producto artículo comentario juego nivel premio título viaje piso cuerpo",
        (r"(?:[cstx]i|[gñ]i|ni)ones|[cs]ión|[dt]ad(?:es)?|tud(?:es)?|umbres?|encias?|ancias?|(?<!m)as",
         r"[aeiouáéíóú]gramas|emas|omas|istas|itas?mas|[^m]os|(?<![aei])mos|es"),
        "mas más menos tras apenas además quizás jamás atrás detrás mientras las los unas unos estas estos esas esos "
        "aquellas nuestras todas algunas otras después antes es ves les nos os entonces pues lejos "
        "vamos somos hemos tres seis dos de del al la el lo en y o u a con sin por para que se su sus como desde hasta "
        "entre sobre según cada ya no ni si muy solo sólo también pero porque cuando donde aunque "
        "fue era es está son están ha han hay tiene va contra ante bajo durante",
        "página pág. capítulo cap. artículo art. número núm. n.º nº sección canal línea autobús bus calle carrera sala "
        "habitación ley nivel versión grupo fase etapa tipo tomo volumen vol. acto escena ejercicio pregunta figura "
        "tabla anexo zona puerta piso planta ruta fórmula serie episodio temporada parte paso opción punto día "
        "versículo lección unidad módulo tema apartado jornada categoría clase división liga copa "
        "windows iphone playstation año",
        "grandes mejores peores mayores menores diferentes importantes principales nacionales internacionales jóvenes "
        "gran posibles simples dobles leves graves iguales tales fuertes",
        "de",
    ),
    "pt": _nouns(
        "c colh pessoa hora semana vez página casa mulher colher xícara chávena lata cebola maçã taça garrafa caixa "
        "bolsa mesa "
        "cadeira cama porta janela rua noite tarde manhã nuvem chave classe base frase fase parte fonte mente morte "
        "sorte rede parede sede série espécie superfície torre mãe filha menina irmã amiga avó tia senhora imagem "
        "ordem "
        "lei voz luz cruz raiz paz flor cor dor mão foto moto rádio criança cidade pitada fatia folha cenoura batata "
        "pera uva empresa palavra libra vida carta letra linha obra ideia coisa pergunta resposta prova venda loja "
        "escola corrida ilha praia montanha língua família guerra batalha medalha moeda tonelada milha polegada "
        "década dúzia planta opinião reunião região religião união questão razão estação lição canção versão sessão "
        "mãe pele árvore bagagem crise tese dose equipe equipa greve ponte gente vítima gota lâmpada vaca galinha "
        "gorjeta viagem mensagem vantagem ação conta tarefa regra tabela lista nota pista roda volta tempestade "
        "célula bactéria molécula etapa temporada chamada entrada saída blusa saia camisa vaga multa dívida parada "
        "praça semente corrente serpente sobremesa mala metade fã maioria minoria delas das folga xícara",
        "dia ano mês minuto segundo ovo dente euro dólar real peso quilo grama litro metro mapa planeta cometa atleta "
        "poeta pijama clima idioma tema problema sistema programa sintoma drama fantasma dilema homem menino irmão "
        "amigo filho pai senhor livro carro cão gato copo prato ponto gol jogo time voto país lugar papel valor erro "
        "motor sofá café chá peixe juiz lápis jovem item trem bem ônibus vírus pires gás plano pão fim milhão bilhão "
        "trimestre semestre século momento grau quilômetro quilómetro centímetro trabalho emprego caso milhar tomate "
        "alho limão cartão coração policial colega camarada deles dos mil nariz índice vértice avião botão",
        (r"[çx]ões|[nsg]iões|ssões|nsões|rsões|stões|usões|isões|esões|liões|ção|ssão|ades?|tudes?|agens?|ências?|âncias?|"
         r"ezas|ãs|(?<!m)as|[uoi]zes|ezes",
         r"[aeiou]gramas|emas|omas|istas|[^m]os|(?<![aeiá])mos|ões|es|ais|eis|óis|uis|ens|ins|uns"),
        "mas mais menos apenas as os umas uns estas essas aquelas nas nos pelas pelos às aos suas seus minhas "
        "nossas atrás depois antes pois vamos somos temos dois duas três seis e ou a o de do da em no "
        "na com sem por para que se seu sua como desde até entre sobre cada já não nem muito só também quando onde "
        "embora foi era é está são estão há tem vai contra ante durante lhes nós vós eles elas es",
        "página pág. capítulo cap. artigo art. número nº n.º secção seção canal linha ônibus autocarro rua avenida "
        "sala "
        "quarto lei nível versão grupo fase etapa tipo tomo volume vol. ato cena exercício pergunta questão figura "
        "tabela anexo zona porta piso andar rota fórmula série episódio temporada parte passo opção ponto dia item "
        "versículo lição unidade módulo tema jornada categoria classe divisão liga rodada windows iphone ano "
        "apartamento casa apto bloco lote quadra aula",
        "grandes melhores piores maiores menores diferentes importantes principais nacionais internacionais jovens "
        "possíveis simples iguais tais fortes",
        "de",
    ),
    "it": _nouns(
        "persona settimana volta casa ora scatola cipolla pagina notte parte classe base frase fase fonte morte rete "
        "chiave nave madre figlia bambina ragazza sorella amica nonna zia signora voce luce croce radice pace legge "
        "mano foto moto radio auto città donna tazza bottiglia lattina busta tavola sedia porta finestra via strada "
        "carota patata mela pera fetta foglia goccia bustina manciata tazzina azienda parola sterlina vita lettera "
        "linea opera idea cosa domanda risposta prova vendita canzone stazione lezione versione azione regione "
        "ragione opinione riunione canzone isola spiaggia montagna lingua famiglia guerra battaglia medaglia moneta "
        "tonnellata decina dozzina coppia pianta tesi crisi ipotesi dose analisi serie specie arancia banana "
        "zucchina melanzana costa vittoria sconfitta partita squadra gara tappa stagione chiamata camera cena "
        "pillola compressa cucchiaiata noce cartella tabella lista nota regola scuola stella cellula confezione",
        "anno mese giorno minuto secondo uovo spicchio cucchiaio cucchiaino bicchiere euro dollaro franco chilo "
        "grammo litro metro chilometro studente uomo bambino ragazzo fratello amico figlio padre signore libro cane "
        "gatto piatto punto gol voto paese luogo pezzo albero colore valore errore motore caffè pesce limone "
        "pomodoro problema sistema programma tema sintomo dramma clima pianeta poeta zaino zio gnomo psicologo "
        "sconto scatto stadio spazio sport studio strato gelato panino etto ettaro quintale pacchetto pacco foglio "
        "mazzo rametto pizzico filo peperone aglio vasetto barattolo milione miliardo film computer bar treno tram "
        "autobus hotel messaggio utente cliente turista paziente lavoratore dipendente secolo decennio momento "
        "grado caso articolo titolo gioco livello premio viaggio piano corpo posto lavoro ospite cartone sacchetto "
        "abitante dipendente incidente giornale ristorante albergo appartamento ufficio esempio",
        (r"zione|sione|tà|tudine|anza|enza", r"mento|tore|aggio"),
        "e o a di del dello della dei degli delle da in con per tra fra su sul che se ogni al alla nel si non è sono "
        "ha hanno era più meno anche come ma il lo la i gli le",
        "pagina pag. capitolo cap. articolo art. numero n. n° sezione canale linea autobus via sala camera legge "
        "livello versione gruppo fase tappa tipo tomo volume vol. atto scena esercizio domanda figura tabella "
        "allegato zona porta piano formula serie episodio stagione parte passo opzione punto comma giorno lezione "
        "unità modulo tema categoria classe girone lega gara windows iphone anno binario quota",
        "",
        "di",
    ),
    "fr": _nouns(
        "c personne femme fille voiture maison idée page semaine minute heure seconde année journée fois main fin nuit "
        "mort mer dent clé souris voix croix noix fourmi peau eau forêt cour soif faim fleur couleur sœur soeur peur "
        "valeur erreur longueur hauteur douleur vis part loi paroi vertu tribu chanson maison raison saison prison "
        "boisson leçon façon mère tante amie copine cuillère cuillerée tasse boîte bouteille pomme carotte gousse "
        "feuille tranche pincée branche poignée ville rue route ligne lettre phrase liste note règle porte fenêtre "
        "table chaise chambre pièce place île plage montagne langue famille guerre bataille médaille monnaie tonne "
        "douzaine dizaine centaine entreprise école classe équipe étape partie chose question réponse vente "
        "entrée sortie étoile planète cellule bactérie molécule vache chèvre poule vidéo photo moto radio chance "
        "journée soirée matinée femme dame victime plante arme balle commande carte offre demande application "
        "couronne roupie tomate orange banane pomme poire fraise cerise aubergine courgette salade tarte gélule dose "
        "goutte licence image machine marche norme piscine preuve promesse recette robe série tâche taxe usine visite "
        "voie bougie pilule serviette chaussure chemise veste jupe cravate attaque cause "
        "rencontre ferme station pause campagne",
        "an jour mois siècle kilomètre mètre centimètre gramme litre kilo euro dollar franc homme garçon élève chat "
        "chien œuf oeuf verre livre centime article exemple problème système programme thème groupe membre nombre "
        "titre arbre oncle père frère peuple mètre siècle ministre musée lycée trophée côté été comité traité député "
        "invité employé blessé million milliard quart tiers point but match pays lieu morceau sachet bâton café thé "
        "article service commerce incendie génie angle axe chiffre cadre cercle club code compte comte conte concombre "
        "disque domaine document kilogramme volume véhicule organisme parlementaire athlète élève touriste artiste "
        "malade locataire propriétaire actionnaire étudiant habitant enfant salarié joueur client poivre "
        "film immeuble étage acte monde modèle poème stade symptôme territoire texte théâtre trimestre semestre "
        "vote village voyage message visage fromage garage nuage avantage dommage gage otage passage virage barrage "
        "rivage sondage chômage pourcentage dalmatien",
        (r"[ts]ions?|xions?|aisons?|ettes?|ences?|ances?|esses?|ures?|ités?|ières?|ées?|ades|trices?|euses?",
         r"isme?s?|ments?|eaux?|oirs?|iers?|eurs?|ants?|ents?|[^e]ls?|ons?|ins?|ards?|ets?|ois"),
        "les des aux et ou à a de du la le un une en dans par pour sur sous avec sans chez mais donc or ni car que qui "
        "se ne pas plus moins très trop tous toutes est sont était sera ont avait fait dit parle entre contre comme "
        "après avant depuis pendant vers selon lors autre autres même mêmes explique commence traite reste "
        "seule seul dès si ce cette ces son sa ses leur leurs nous vous ils elles il elle on",
        "page chapitre article art. étape niveau partie numéro n° no version épisode saison tome volume vol. scène "
        "acte "
        "exercice question figure tableau section annexe groupe catégorie type phase zone ligne bus tram métro quai "
        "voie porte salle chambre bâtiment étage appartement rue avenue boulevard route autoroute canal chaîne ligue "
        "formule france jour leçon unité module point option division année années windows iphone top au",
        "grandes jeunes autres rares simples",
        "de",
    ),
}  # fmt: skip

_FEMININE_BEFORE = frozenset("las unas estas esas aquellas as umas nas das às estas essas aquelas".split())
_MASCULINE_BEFORE = frozenset("los unos estos esos aquellos os uns nos dos aos estes esses aqueles".split())
_YEAR_AFTER = frozenset("en em in nel dal desde año ano anno an depuis dès l'an l'année".split())
_RANGE = frozenset("a o u ou à oppure".split())
_AND = {"es": "y", "pt": "e", "it": "e", "fr": "et"}
_CLOSING = "\"').,;:!?»”"
_NUMBER = re.compile(r"\d[\d.]*")
_ITALIAN_MANY = frozenset(
    "persone abitanti euro dollari lire sterline utenti copie visitatori spettatori italiani cittadini metri "
    "chilometri tonnellate anni posti famiglie voti turisti lavoratori bambini studenti litri barili case".split()
)
_HALF = re.compile(r"(?:^|[^\d/])1/2$")


def _singulars(code: str, word: str) -> list[str]:
    """The word, and what may be its singular."""
    found = [word]
    if code == "it":
        ends = {"che": "ca", "ghe": "ga", "chi": "co", "ie": "ia", "e": "a"}
        found += [word.removesuffix(end) + single for end, single in ends.items() if word.endswith(end)]
        return [*found, word[:-1] + "o", word[:-1] + "e", word + "o"] if word[-1] == "i" else found
    if word[-1] in "sx" and len(word) > 2:
        found.append(word[:-1])
        ends = {"ces": "z", "es": "", "ns": "m", "ões": "ão", "ais": "al", "eis": "el"}
        found += [word.removesuffix(end) + single for end, single in ends.items() if word.endswith(end)]
    return found


def gender(code: str, word: str) -> str:
    """The gender of a noun or of an adjective, "m" or "f"; empty if it is not sure or the word is no noun."""
    nouns = _NOUNS[code]
    if not _WORD.fullmatch(word) or word in nouns.others or word[1:2] in ("'", "’"):
        return ""
    singulars = _singulars(code, word)
    for known, found in ((nouns.feminine, "f"), (nouns.masculine, "m")):
        if not known.isdisjoint(singulars):
            return found
    if code in ("es", "pt") and re.search("(?:[eo]|gra|ra)mas$|istas$", word):
        return "m"
    if nouns.feminine_ends.search(word):
        return "f"
    return "m" if nouns.masculine_ends.search(word) else ""


def singular(code: str, noun: str) -> str:
    """The singular of a noun."""
    nouns = _NOUNS[code]
    known = (word for word in _singulars(code, noun)[1:] if word in nouns.feminine or word in nouns.masculine)
    return next(known, noun.removesuffix("s"))


def feminine(code: str, words: str) -> str:
    """A number in words as it is before a feminine noun. What counts millions stays."""
    start = max((found.end() for found in re.finditer(r"\b(?:mi|bi|tri)l[lh]\w+ ", words)), default=0)
    head, tail = words[:start], words[start:]
    if code == "es":
        tail = re.sub(r"(cient|quinient)os\b", r"\1as", re.sub("uno$", "una", tail))
    elif code == "pt":
        tail = re.sub(r"\bdois\b", "duas", re.sub(r"\bum\b", "uma", tail))
        tail = re.sub(r"(\w+(?:cent|zent|hent))os\b", r"\1as", tail)
    elif code == "fr":
        tail = re.sub("un$", "une", tail)
    elif words == "uno":
        return "una"
    return head + tail


def _italian(noun: str, is_feminine: bool) -> str:
    """The number 1."""
    if is_feminine:
        return "un'" if noun[0] in "aeiouàèéìòù" else "una"
    return "uno" if re.match("z|gn|ps|x|y|pn|s[^aeiouàèéìòù]", noun) else "un"


class Agreement:
    """Makes a number agree with what stands around it, in one language. Other languages are left alone."""

    def __init__(self, code: str, around: Around):
        self.code, self.around = code, around
        self.nouns = _NOUNS.get(code)

    def holds(self, word: str, held: str) -> bool:
        """Is the word, behind the word `held`, needed to tell what a number agrees with?"""
        if self.nouns and (held, word) in (("de", "cada"), ("em", "cada")) or held == "cada" and word.isdecimal():
            return bool(self.nouns)
        if not self.nouns or not held[-1].isdecimal():
            return self.nouns is not None and held in (*_RANGE, _AND[self.code]) and word in self.nouns.both
        if word in _RANGE or (word == "em" and self.code == "pt") or word in self.nouns.both or word == _AND[self.code]:
            return True
        if self.code == "it" and held.lstrip("(") == "1" and word[:1] in tuple("aeiou"):
            return gender("it", word) == "f"
        if self.code == "fr" and held.endswith("000") and word[:1] in tuple("aeiouyéèêœh"):
            return bool(gender("fr", word))
        return bool(_HALF.search(held)) and bool(gender(self.code, word))

    def noun(self, found: re.Match[str]) -> str:
        """The word that the number counts, or else the next word; empty if a mark follows."""
        nouns, text = self.nouns, found.string[found.end() :]
        if not nouns or (text and text[0] != " "):
            return ""
        words = [*text.split(), self.around.after]
        between = self.around.word_before(found) in ("entre", "tra", "fra")
        if len(words) > 2 and (words[0] in _RANGE or (between and words[0] == _AND[self.code])):
            if _NUMBER.fullmatch(words[1]):
                words = words[2:]
        if len(words) > 3 and words[1] == "cada" and words[2].isdecimal():
            return words[3].rstrip(_CLOSING)  # 1 de cada 5 niñas
        while len(words) > 1 and words[0] in nouns.both:
            words = words[1:]
        if len(words) > 1 and words[0] == "de" and self.code == "es" and words[1] in _FEMININE_BEFORE:
            words = words[1:]  # 1 de las
        return words[0].rstrip(_CLOSING)

    def __call__(self, found: re.Match[str], value: str, said: str, in_range: bool = False) -> str:
        """The words for a whole number, as they are at this place."""
        nouns = self.nouns
        if not nouns or not value.isdecimal():
            return said
        before = self.around.word_before(found)
        if before in nouns.labels or (before.rstrip(".") + "." in nouns.labels):
            return re.sub("(vingt|cent)s$", r"\1", said) if self.code == "fr" else said
        if before in _YEAR_AFTER and re.fullmatch(r"1[1-9]\d\d|20\d\d", found[0]):
            return said
        noun = self.noun(found)
        known = gender(self.code, noun)
        each = " cada " in found.string[found.end() : found.end() + 9]
        is_one = value == "1" and not in_range and not each
        if self.code != "it" and known and (noun[-1] in "sx") == is_one and noun not in self._listed():
            known = ""
        if (
            noun in ("las", "das", "delas", "delle", "nuestras")
            and is_one
            or (noun in ("das", "delas") and value == "2")
        ):
            known = "f"
        elif self.code in ("es", "pt") and not known and not noun[:1].isdigit():
            known = "f" if before in _FEMININE_BEFORE else "m" if noun and before in _MASCULINE_BEFORE else ""
        if int(value) and int(value) % 10**6 == 0 and (known if self.code != "it" else noun in _ITALIAN_MANY):
            vowel = self.code == "fr" and noun[0] in "aeiouyéèêœh"
            return f"{said} d'" if vowel else f"{said} {nouns.of}"
        if known == "f" and self.code != "it":
            return feminine(self.code, said)
        if known and self.code == "it":
            return self._italian(value, said, noun, known)
        if known and self.code == "es" and noun not in nouns.others:
            return re.sub("uno$", "un", re.sub("veintiuno$", "veintiún", said))
        return said if known or not self._is_open(value, noun, said, in_range) else keep(found[0])

    def _listed(self) -> frozenset[str]:
        return self.nouns.feminine | self.nouns.masculine if self.nouns else frozenset()

    def _italian(self, value: str, said: str, noun: str, known: str) -> str:
        if value == "1":
            return _italian(noun, known == "f")
        return re.sub("uno$", "un", said) if noun == "anni" and said.endswith("uno") else said

    def _is_open(self, value: str, noun: str, said: str, in_range: bool) -> bool:
        """May the noun be of either gender, and would the number differ?"""
        if not self.nouns or not noun.islower() or not _WORD.fullmatch(noun) or noun in self.nouns.others or in_range:
            return False
        if self.code == "fr":
            return said.endswith("un") and (noun.endswith("e") if value == "1" else noun.endswith("es"))
        return value == "1" and (self.code != "pt" or noun.endswith("a"))

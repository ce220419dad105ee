"""Evaluation metrics on lists and NumPy arrays; each metric is implemented once.

    classes   single-label and multi-label classification: accuracy, F1, AUC, Matthews, confusion,
              recall at a precision, precision at a threshold
    numbers   regression: Pearson, Spearman, mean squared error; the cosine of vectors
    chunks    chunks in tag sequences: schemes, conversion, F1 as in conlleval
    answers   text answers: SQuAD 1.1 and 2.0, CMRC2018 and DRCD
    texts     generated texts: BLEU, ROUGE, distinct n-grams
    ranking   candidates ranked within groups: MRR, MAP, nDCG, precision, recall and hits at k, PN
              ratio
    counts    correct, predicted and expected counts, with precision, recall and F1
    units     which metrics are displayed in per cent

Predictions are the first argument, references the second. All scores are fractions of 1, never per
cent. Precision, recall and F1 are 0 when their denominator is 0, as in scikit-learn and conlleval;
a mean over no values is NaN.
"""

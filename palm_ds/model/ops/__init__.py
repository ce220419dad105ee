"""Operations with more than one implementation: dropout, norms, vocabulary losses."""

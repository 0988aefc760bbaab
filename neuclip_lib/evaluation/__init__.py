"""How good a run is: functions of embeddings, models and data, one module a question.

``embed`` (model and data to embeddings), ``retrieval``, ``zero_shot``, ``normalizer_error``, ``geometry``. Import the
functions from their modules: here a name is always the module.
"""

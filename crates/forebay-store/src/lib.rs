//! What a model folder contains, checked before anything is allocated: config, tensor catalogue, layouts.

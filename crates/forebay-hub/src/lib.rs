//! Where models come from. So far: [`synth`], models of random weights with the true shape of GLM-5.2, for
//! measuring without 360 GB of download.

pub mod synth;

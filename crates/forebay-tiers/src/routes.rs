//! Routes: which experts a model chose, as a simulator replays them.
//!
//! [`synthetic`] makes them up so that their statistics are those of GLM-5.2, [`mod@file`]
//! holds recorded ones and [`text`] shows these.

pub mod file;
pub mod synthetic;
pub mod text;

/// The routes of a model: for each sparse layer the steps in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routes {
    /// Experts of a layer.
    pub experts: usize,
    /// Experts that a token uses.
    pub top_k: usize,
    /// The layers, each with its steps. Step `i` of all layers belongs to one pass.
    pub layers: Vec<Vec<Union>>,
}

/// What one step of one layer chose.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Union {
    /// The distinct experts in routing order: first row first, best first.
    pub experts: Vec<u32>,
    /// How many rows chose each.
    pub uses: Vec<u32>,
    /// Rows.
    pub rows: u64,
}

impl Union {
    /// The union of `rows`, each a list of distinct experts, best first.
    pub fn of<'a>(rows: impl IntoIterator<Item = &'a [u32]>) -> Self {
        let mut union = Self::default();
        let mut at = std::collections::HashMap::new();
        for row in rows {
            union.rows += 1;
            for &expert in row {
                let place = *at.entry(expert).or_insert(union.experts.len());
                if place == union.experts.len() {
                    union.experts.push(expert);
                    union.uses.push(0);
                }
                union.uses[place] += 1;
            }
        }
        union
    }
}

impl Routes {
    /// How often each expert was chosen, per layer.
    pub fn counts(&self) -> Vec<Vec<u64>> {
        let count = |steps: &Vec<Union>| {
            let mut counts = vec![0u64; self.experts];
            for union in steps {
                for (&expert, &uses) in union.experts.iter().zip(&union.uses) {
                    counts[expert as usize] += u64::from(uses);
                }
            }
            counts
        };
        self.layers.iter().map(count).collect()
    }

    /// The first `steps` steps of every layer, and the rest.
    pub fn split(mut self, steps: usize) -> (Self, Self) {
        let later = self.layers.iter_mut().map(|layer| layer.split_off(steps.min(layer.len()))).collect();
        let rest = Self { experts: self.experts, top_k: self.top_k, layers: later };
        (self, rest)
    }

    /// The share of a step's experts that the step before it used too, over the steps of
    /// one row that follow one of one row; `None` if there are none.
    pub fn overlap(&self) -> Option<f64> {
        let (mut shared, mut all) = (0usize, 0usize);
        for pair in self.layers.iter().flat_map(|layer| layer.windows(2)) {
            let [before, now] = pair else { continue };
            if before.rows == 1 && now.rows == 1 {
                shared += now.experts.iter().filter(|expert| before.experts.contains(expert)).count();
                all += now.experts.len();
            }
        }
        (all > 0).then(|| shared as f64 / all as f64)
    }

    /// Mean number of distinct experts in `steps` steps on end, over windows that overlap
    /// by half; `None` if no layer has as many.
    pub fn distinct(&self, steps: usize) -> Option<f64> {
        let (mut sum, mut windows) = (0usize, 0usize);
        for layer in &self.layers {
            for window in layer.windows(steps.max(1)).step_by((steps / 2).max(1)) {
                let mut seen: Vec<u32> = window.iter().flat_map(|union| &union.experts).copied().collect();
                seen.sort_unstable();
                seen.dedup();
                sum += seen.len();
                windows += 1;
            }
        }
        (windows > 0).then(|| sum as f64 / windows as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_union_is_in_first_seen_order() {
        let rows: [&[u32]; 3] = [&[7, 3], &[3, 9], &[7, 9]];
        let union = Union::of(rows);
        assert_eq!(union, Union { experts: vec![7, 3, 9], uses: vec![2, 2, 2], rows: 3 });
    }

    #[test]
    fn statistics() {
        let steps = |rows: &[&[u32]]| rows.iter().map(|row| Union::of([*row])).collect::<Vec<_>>();
        let routes =
            Routes { experts: 8, top_k: 2, layers: vec![steps(&[&[0, 1], &[1, 2], &[5, 6], &[6, 5]])] };
        assert_eq!(routes.overlap(), Some(3.0 / 6.0));
        assert_eq!(routes.distinct(2), Some((3.0 + 4.0 + 2.0) / 3.0));
        assert_eq!(routes.distinct(9), None);
        assert_eq!(routes.counts(), [[1, 2, 1, 0, 0, 2, 2, 0]]);
        let (first, rest) = routes.split(3);
        assert_eq!((first.layers[0].len(), rest.layers[0].len(), rest.experts), (3, 1, 8));
        assert_eq!(Routes::default().overlap(), None);
    }
}

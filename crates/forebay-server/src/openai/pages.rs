//! Lists that are sent a page at a time.

use axum::http::Uri;
use serde_json::{Value, json};

use crate::error::ApiError;

/// What a client wants of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Query {
    /// Behind this one.
    after: Option<String>,
    /// At most so many.
    limit: usize,
    /// The oldest first.
    ascending: bool,
    /// Only files for this.
    pub purpose: Option<String>,
}

impl Query {
    /// Reads the query of a request. `most` is the largest page, `usual` one where the request does not say.
    pub fn read(uri: &Uri, usual: usize, most: usize, of_files: bool) -> Result<Self, ApiError> {
        let mut query = Self { after: None, limit: usual, ascending: false, purpose: None };
        for pair in uri.query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let wrong = |expected: &str| {
                let value: String = value.chars().take(80).collect();
                ApiError::param(name, format!("{name} must be {expected}, found {value:?}"))
            };
            match name {
                "after" => query.after = Some(value.to_owned()),
                "limit" => {
                    let limit = value.parse().ok().filter(|limit| (1..=most).contains(limit));
                    query.limit = limit.ok_or_else(|| wrong(&format!("a whole number from 1 to {most}")))?;
                }
                "order" if of_files => {
                    query.ascending = match value {
                        "asc" => true,
                        "desc" => false,
                        _ => return Err(wrong("asc or desc")),
                    }
                }
                "purpose" if of_files => query.purpose = Some(value.to_owned()),
                _ => {
                    let name: String = name.chars().take(80).collect();
                    let message = format!("the parameter {name} is not supported; leave it out");
                    return Err(ApiError::param(name, message).code("unsupported_parameter"));
                }
            }
        }
        Ok(query)
    }

    /// The page, of a list with the newest first.
    pub fn page<T>(
        &self,
        mut all: Vec<T>,
        id: impl Fn(&T) -> String,
        show: impl Fn(&T) -> Value,
    ) -> Result<Value, ApiError> {
        if self.ascending {
            all.reverse();
        }
        let begin = match &self.after {
            None => 0,
            Some(after) => match all.iter().position(|one| id(one) == *after) {
                Some(place) => place + 1,
                None => {
                    let after: String = after.chars().take(80).collect();
                    return Err(ApiError::param(
                        "after",
                        format!("after names {after:?}, which is not in the list"),
                    ));
                }
            },
        };
        let page = &all[begin..all.len().min(begin + self.limit)];
        Ok(json!({
            "object": "list",
            "data": page.iter().map(show).collect::<Vec<_>>(),
            "first_id": page.first().map(&id),
            "last_id": page.last().map(&id),
            "has_more": begin + page.len() < all.len(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_follow_each_other_in_both_orders() {
        let query = |text: &str| Query::read(&format!("/x?{text}").parse().unwrap(), 2, 5, true);
        let page = |text: &str| {
            let all = vec!["d", "c", "b", "a"];
            let page = query(text).unwrap().page(all, |id| (*id).to_owned(), |id| json!(id)).unwrap();
            (page["data"].clone(), page["has_more"].clone())
        };
        assert_eq!(page(""), (json!(["d", "c"]), json!(true)));
        assert_eq!(page("after=c"), (json!(["b", "a"]), json!(false)));
        assert_eq!(page("order=asc&limit=3&after=a"), (json!(["b", "c", "d"]), json!(false)));
        assert_eq!(page("after=a"), (json!([]), json!(false)));
        for (wrong, param) in
            [("limit=0", "limit"), ("limit=6", "limit"), ("order=up", "order"), ("x=1", "x")]
        {
            assert_eq!(query(wrong).unwrap_err().param.as_deref(), Some(param));
        }
        let lost = query("after=z").unwrap().page(vec!["a"], |id| (*id).to_owned(), |id| json!(id));
        assert_eq!(lost.unwrap_err().param.as_deref(), Some("after"));
    }
}

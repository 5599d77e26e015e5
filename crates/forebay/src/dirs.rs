//! The user's folders, by the custom of each system.

use std::path::PathBuf;

/// An environment variable that names an absolute path; anything else counts as unset, as the XDG base
/// directory specification asks.
fn absolute(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// Where files go that can be made again: `FOREBAY_CACHE`, else the system's place for caches.
pub fn cache() -> Option<PathBuf> {
    let chosen = std::env::var_os("FOREBAY_CACHE").filter(|value| !value.is_empty()).map(PathBuf::from);
    chosen.or_else(|| {
        let base = if cfg!(windows) {
            absolute("LOCALAPPDATA")
        } else if cfg!(target_os = "macos") {
            absolute("HOME").map(|home| home.join("Library/Caches"))
        } else {
            absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))
        };
        base.map(|base| base.join("forebay"))
    })
}

/// Where files that can be made again go when the user has no folder for them: one of their own in the
/// system's folder for temporary files.
pub fn temporary_cache() -> PathBuf {
    std::env::temp_dir().join(format!("forebay-{}", user()))
}

/// Tells users of one machine apart.
fn user() -> String {
    #[cfg(unix)]
    if let Ok(process) = std::fs::metadata("/proc/self") {
        return std::os::unix::fs::MetadataExt::uid(&process).to_string();
    }
    let name = ["USER", "USERNAME"].into_iter().find_map(|variable| std::env::var(variable).ok());
    let name: String = name.unwrap_or_default().chars().filter(|c| c.is_alphanumeric()).collect();
    if name.is_empty() { "user".to_owned() } else { name }
}

/// Where Hugging Face's tools keep cache and token: `HF_HOME`, else their default, which is the same on all systems.
pub fn hugging_face() -> Option<PathBuf> {
    let chosen = std::env::var_os("HF_HOME").filter(|value| !value.is_empty()).map(PathBuf::from);
    chosen.or_else(|| {
        let home = || absolute(if cfg!(windows) { "USERPROFILE" } else { "HOME" });
        let cache = absolute("XDG_CACHE_HOME").or_else(|| home().map(|home| home.join(".cache")));
        cache.map(|cache| cache.join("huggingface"))
    })
}

/// Where goes what a program remembers between its runs, such as conversations: `XDG_STATE_HOME` on Linux.
pub fn state() -> Option<PathBuf> {
    let base = if cfg!(windows) {
        absolute("LOCALAPPDATA")
    } else if cfg!(target_os = "macos") {
        absolute("HOME").map(|home| home.join("Library/Application Support"))
    } else {
        absolute("XDG_STATE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/state")))
    };
    base.map(|base| base.join("forebay"))
}

/// Where the user's own data goes, such as the chat history.
pub fn data() -> Option<PathBuf> {
    let base = if cfg!(windows) {
        absolute("LOCALAPPDATA")
    } else if cfg!(target_os = "macos") {
        absolute("HOME").map(|home| home.join("Library/Application Support"))
    } else {
        absolute("XDG_DATA_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/share")))
    };
    base.map(|base| base.join("forebay"))
}
